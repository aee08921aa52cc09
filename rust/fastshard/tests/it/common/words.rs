//! The words that the product declares, as they stand in the list of Python: tests know no others.

use std::collections::BTreeMap;

const LIST: &str = include_str!("../../../../../python/fastshard/models/tensor_words.py");

/// The words by what they tell.
pub fn words<W: serde::de::DeserializeOwned>() -> W {
    let list = LIST.split("WORDS:").nth(1).and_then(|rest| rest.split("# What Python alone").next()).unwrap();
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for entry in list.split("\": (").collect::<Vec<_>>().windows(2) {
        let name = entry[0].rsplit('"').next().unwrap();
        let words = entry[1].split(')').next().unwrap().split('"').skip(1).step_by(2);
        found.insert(name, words.collect());
    }
    serde_json::from_value(serde_json::to_value(found).unwrap()).unwrap()
}
