use proptest::prelude::*;

use super::*;

fn entry(name: &str, shape: Option<Vec<Option<u64>>>, dtype: Option<Dtype>, optional: bool) -> Entry {
    Entry { name: name.into(), shape, dtype, optional }
}

fn needed(name: &str) -> Entry {
    entry(name, None, None, false)
}

fn names<'a>(entries: &[&'a Entry]) -> Vec<&'a str> {
    entries.iter().map(|entry| entry.name.as_str()).collect()
}

fn present<'a>(name: &'a str, shape: &'a [u64]) -> PresentTensor<'a> {
    PresentTensor { stored: name, own: name, shape, dtype: Dtype::F32 }
}

#[test]
fn what_is_not_known_of_a_shape_fits_all() {
    let known = |shape: Option<Vec<Option<u64>>>| entry("a", shape, None, false);
    assert!(known(None).fits(&[3, 4]) && known(None).fits(&[]));
    assert!(known(Some(vec![None, Some(4)])).fits(&[3, 4]));
    assert!(!known(Some(vec![None, Some(4)])).fits(&[4, 3]));
    assert!(!known(Some(vec![None])).fits(&[3, 4]));
    assert!(known(Some(vec![])).fits(&[]) && !known(Some(vec![])).fits(&[1]));
}

#[test]
fn of_tied_tensors_one_is_enough() {
    let group = vec![vec!["embed".to_string(), "head".to_string()]];
    let roster = Roster::new(vec![needed("head"), needed("norm"), needed("embed")], &group).unwrap();
    assert_eq!(names(&roster.compared([present("head", &[])]).missing), ["norm"]);
    assert_eq!(names(&roster.compared([present("norm", &[])]).missing), ["embed", "head"]);
}

#[test]
fn a_tensor_may_be_optional() {
    let roster = Roster::new(vec![entry("a", None, None, true), needed("b")], &[]).unwrap();
    assert_eq!(names(&roster.compared([]).missing), ["b"]);
}

#[test]
fn two_tensors_of_one_name_are_one_and_a_further_one() {
    let roster = Roster::new(vec![needed("a")], &[]).unwrap();
    let twice = ["x", "y"].map(|stored| PresentTensor { stored, own: "a", shape: &[], dtype: Dtype::F32 });
    let found = roster.compared(twice);
    assert_eq!((found.further, found.same), (vec!["y"], 1));
}

#[test]
fn a_roster_that_contradicts_itself_is_none() {
    let twice = Roster::new(vec![needed("a"), needed("a")], &[]).unwrap_err();
    let first = |error: &Error| (error.findings()[0].code, error.findings()[0].tensor.clone());
    assert_eq!(first(&twice), (codes::USAGE, Some("a".into())));
    let unknown = Roster::new(vec![needed("a")], &[vec!["b".into()]]).unwrap_err();
    assert_eq!(first(&unknown), (codes::USAGE, Some("b".into())));
}

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::I8];

fn name() -> impl Strategy<Value = String> {
    "[abc]{1,2}(\\.[01])?"
}

fn shape() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(1u64..3, 0..3)
}

fn known() -> impl Strategy<Value = Option<Vec<Option<u64>>>> {
    prop::option::of(prop::collection::vec(prop::option::weighted(0.8, 1u64..3), 0..3))
}

proptest! {
    /// The same as looking for each in a list, in the order in which they stand.
    #[test]
    fn compared_equals_the_oracle(
        wanted in prop::collection::btree_map(name(), (known(), prop::option::of(0usize..3), any::<bool>()), 0..12),
        stored in prop::collection::btree_map(name(), (name(), shape(), 0usize..3), 0..12),
        grouped in prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 1..4), 0..3),
    ) {
        let entries: Vec<Entry> = wanted
            .iter()
            .rev()
            .map(|(name, (shape, dtype, optional))| entry(name, shape.clone(), dtype.map(|d| DTYPES[d]), *optional))
            .collect();
        let groups: Vec<Vec<String>> = match entries.is_empty() {
            true => Vec::new(),
            false => grouped.iter().map(|g| g.iter().map(|i| i.get(&entries).name.clone()).collect()).collect(),
        };
        let roster = Roster::new(entries.clone(), &groups).unwrap();
        let all: Vec<PresentTensor> = stored
            .iter()
            .map(|(name, (own, shape, dtype))| PresentTensor { stored: name, own, shape, dtype: DTYPES[*dtype] })
            .collect();
        let found = roster.compared(all.iter().copied());

        let first = |own: &str| all.iter().find(|one| one.own == own);
        let mut want = Comparison::default();
        for one in &all {
            let is_first = first(one.own).is_some_and(|other| other.stored == one.stored);
            match entries.iter().find(|entry| entry.name == one.own).filter(|_| is_first) {
                None => want.further.push(one.stored),
                Some(entry) => {
                    let same_shape = match &entry.shape {
                        None => true,
                        Some(shape) if shape.len() != one.shape.len() => false,
                        Some(shape) => (0..shape.len()).all(|i| shape[i].is_none() || shape[i] == Some(one.shape[i])),
                    };
                    let same_dtype = entry.dtype.is_none() || entry.dtype == Some(one.dtype);
                    if !same_shape {
                        want.differing.push((one.stored, one.shape, entry));
                    }
                    if !same_dtype {
                        want.dtypes.push((one.stored, one.dtype, entry.dtype.unwrap()));
                    }
                    if let Some(dtype) = entry.dtype {
                        *want.kinds.entry((one.dtype, dtype)).or_default() += 1;
                    }
                    want.same += usize::from(same_shape && same_dtype);
                }
            }
        }
        let mut ordered: Vec<&Entry> = entries.iter().collect();
        ordered.sort_by_key(|entry| entry.name.clone());
        want.missing = ordered
            .into_iter()
            .filter(|entry| {
                let in_hand = |name: &str| first(name).is_some();
                let excused = groups.iter().any(|g| g.contains(&entry.name) && g.iter().any(|name| in_hand(name)));
                !entry.optional && !in_hand(&entry.name) && !excused
            })
            .collect();
        prop_assert_eq!(found, want);
    }
}
