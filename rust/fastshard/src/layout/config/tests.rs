//! Expressions against values written by hand, an oracle, and whatever else a config may hold.

use proptest::prelude::*;
use serde_json::{json, Value as Json};

use super::Expression;
use crate::layout::sets::Positions;
use crate::layout::table::{Facts, Table};

fn table(config: &str, sets: &str) -> Table {
    let text = format!(
        r#"
        layout = "toy"
        family = "toy"
        [axes]
        t = 2
        [config]
        model_type = ["toy"]
        within = ["text_config"]
        {config}
        [sets]
        {sets}
        [[tensor]]
        name = "layers.{{L}}.q"
        shape = "[h*d, H]"
        when = "bias"
        [[tensor]]
        name = "layers.{{L}}.(q|k)"
        shape = "[h*d, t, H]"
        when = "bias & !wide"
        "#
    );
    Table::parse(&text).unwrap()
}

fn axis(expression: &str, config: &Json) -> std::result::Result<Option<u64>, String> {
    let table = table(&format!("axes.x = {expression:?}"), "");
    let described = table.describe(Some(config), &[], Some("config.json"));
    described.map(|d| d.extents.get("x").copied()).map_err(|e| e.to_string())
}

fn fact(expression: &str, config: &Json) -> std::result::Result<Option<bool>, String> {
    let table = table(&format!("facts.x = {expression:?}"), "");
    let described = table.describe(Some(config), &[], None);
    described.map(|d| d.facts.get("x").copied()).map_err(|e| e.to_string())
}

#[test]
fn sizes() {
    let config = json!({"a": 12, "b": 5, "ratio": 2.6666, "zero": 0, "big": i64::MAX, "none": null, "list": [4, 3],
        "text_config": {"a": 8, "none": 7, "deep": {"e": 9}}});
    for (text, wanted) in [
        ("a", Some(8)),
        ("b", Some(5)),
        ("none", Some(7)),
        ("deep.e", Some(9)),
        ("deep.f", None),
        ("missing.e", None),
        ("missing + 1", None),
        ("missing ?? a / 4", Some(2)),
        ("missing ?? missing", None),
        ("b - 7 + a", Some(6)),
        ("b // 2 * 2 + b % 2", Some(5)),
        ("(0 - b) // 2 + a", Some(5)),
        ("(0 - b) % 3", Some(1)),
        ("int(a * ratio)", Some(21)),
        ("int(b / 2)", Some(2)),
        ("int(missing * ratio)", None),
        ("list[1]", Some(3)),
        ("[7, 6][0]", Some(7)),
        ("t", Some(2)),
        ("x ?? b", Some(5)),
        ("len(list)", Some(2)),
        ("len([])", Some(0)),
        ("len(missing)", None),
    ] {
        assert_eq!(axis(text, &config), Ok(wanted), "{text}");
    }
    for (text, wanted) in [
        ("a / 3", "a / 3 (axis x of layout toy): expected a multiple of 3, got 8"),
        ("b / zero", "not 0"),
        ("b % zero", "not 0"),
        ("big + 1", "64 bits"),
        ("(0 - big - 1) / (0 - 1)", "64 bits"),
        ("big", "0 or more"),
        ("0 - a", "0 or more"),
        ("ratio", "got 2.6666"),
        ("a * ratio", "config: ratio in \"a * ratio\" (axis x of layout toy): expected an integer"),
        ("int(big + ratio)", "2^53"),
        ("int(ratio / zero)", "2^53"),
        ("list", "got a list of 2"),
        ("list[2]", "a list of more than 2, got a list of 2"),
        ("list[0 - 1]", "a list of more than -1"),
        ("a.b", "expected an object, got 8"),
        ("b[0]", "expected a list"),
        ("len(a)", "expected a list, got 8"),
        ("len(missing ?? deep)", "expected a list, got an object"),
        ("has(a) + 1", "expected an integer, got true"),
    ] {
        let message = axis(text, &config).unwrap_err();
        assert!(message.contains(wanted) && message.starts_with("config.json: "), "{text}: {message}");
    }
}

#[test]
fn three_values() {
    let config = json!({"yes": true, "no": false, "kind": "full", "kinds": ["full", "sliding"], "one": 1, "odd": [1, "x"],
        "text_config": {"no": null}});
    for (text, wanted) in [
        ("yes and not no", Some(true)),
        ("missing and no", Some(false)),
        ("no and missing", Some(false)),
        ("missing or yes", Some(true)),
        ("missing and yes", None),
        ("not missing", None),
        ("missing == 1", None),
        ("has(no) and not has(missing) and not has(kind.x)", Some(true)),
        ("kind in kinds and kind == 'full'", Some(true)),
        ("\"window\" in kinds", Some(false)),
        ("missing in kinds", None),
        ("kind in missing", None),
        ("one in [3, null, 1]", Some(true)),
        ("one != 2", Some(true)),
        ("yes == no", Some(false)),
        ("x2 ?? yes", Some(true)),
    ] {
        assert_eq!(fact(text, &config), Ok(wanted), "{text}");
    }
    assert_eq!(fact("no and 1 / 0 == 1", &config), Ok(Some(false)));
    for (text, wanted) in [
        ("one", "expected true or false, got 1"),
        ("one and yes", "expected true or false"),
        ("kind == 1", "two integers, two texts"),
        ("yes == 1", "two integers, two texts"),
        ("kind in kind", "expected a list"),
        ("'x' in odd", "two texts"),
        ("kinds == kinds", "two texts"),
        ("kind < 'x'", "expected an integer, got \"full\""),
        ("1 / 0 == 1", "not 0"),
    ] {
        let message = fact(text, &config).unwrap_err();
        assert!(message.contains(wanted), "{text}: {message}");
    }
}

#[test]
fn what_a_model_type_has_for_a_key_that_is_left_out() {
    let table = table(
        "defaults = { toy = { n = 3, tie = true }, inner = { n = 4 } }\n\
         axes = { x = \"n ?? m\" }\nfacts = { f = \"tie ?? false\", known = \"has(n)\" }",
        "",
    );
    for (config, x, f, known) in [
        (json!({"model_type": "toy"}), Some(3), true, true),
        (json!({"model_type": "toy", "n": 5, "tie": false}), Some(5), false, true),
        // Stated as null is not left out.
        (json!({"model_type": "toy", "n": null, "m": 7}), Some(7), true, false),
        (json!({"model_type": "other", "m": 7}), Some(7), false, false),
        (json!({"model_type": ["toy"]}), None, false, false),
        (json!({"m": 7}), Some(7), false, false),
        (json!({"model_type": "toy", "text_config": {"model_type": "inner"}}), Some(4), false, true),
        (json!({"model_type": "toy", "n": 6, "text_config": {"n": null}}), Some(6), true, true),
    ] {
        let description = table.describe(Some(&config), &[], None).unwrap();
        assert_eq!(
            (description.extents.get("x").copied(), description.facts["f"], description.facts["known"]),
            (x, f, known),
            "{config}"
        );
    }
}

#[test]
fn the_configs_that_a_table_is_for() {
    let of = |when: &str| {
        let text = format!(
            "layout = \"t\"\nfamily = \"t\"\n[config]\nmodel_type = [\"toy\", \"doll\"]\n{when}\naxes = {{ E = \"n\" }}\n\
             facts = {{ mixed = \"len(only ?? []) > 0 or E == 0\" }}\n"
        );
        Table::parse(&text).unwrap()
    };
    let is_for = |when: &str, config: &Json| of(when).is_for(config, Some("c.json")).unwrap();
    let with = |more: Json| {
        let mut config = json!({"model_type": "doll", "n": 4});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let (mixed, others) = ("when = \"mixed\"", "when = \"not mixed\"");
    for config in [with(json!({})), with(json!({"only": []})), with(json!({"only": null}))] {
        assert!(is_for("", &config) && is_for(others, &config) && !is_for(mixed, &config), "{config}");
    }
    for config in [with(json!({"only": [3]})), with(json!({"n": 0}))] {
        assert!(is_for("", &config) && is_for(mixed, &config) && !is_for(others, &config), "{config}");
    }
    // What is null does not hold, and a model of another type is not looked at further.
    let unknown = with(json!({"n": null}));
    assert!(is_for("", &unknown) && !is_for(mixed, &unknown) && !is_for(others, &unknown));
    for model_type in [json!("other"), json!(null), json!(["toy"])] {
        assert!(!is_for(mixed, &with(json!({"model_type": model_type, "only": "x"}))));
    }
    assert!(!is_for("", &json!([])));
    for (when, config, wanted) in [
        (mixed, with(json!({"only": "x"})), "c.json: config: only ?? []"),
        (mixed, with(json!({"n": -1})), "config: n in \"mixed\" (config when of layout t)"),
        (
            "when = \"n\"",
            with(json!({})),
            "config: n (config when of layout t): expected true or false, got 4",
        ),
    ] {
        let message = of(when).is_for(&config, Some("c.json")).unwrap_err().to_string();
        assert!(message.contains(wanted), "{wanted:?} not in {message}");
    }
}

#[test]
fn an_axis_that_every_model_has_is_not_empty() {
    let text = r#"
        layout = "toy"
        family = "toy"
        [axes]
        d = "t*c"
        [config]
        axes = { L = "l", c = "c", t = "t", V = "v", P = "v", E = "e", F = "f", S = "s", O = "o" }
        [sets]
        moe = { where = "E > 0 and L > 0", axis = "L" }
        [[tensor]]
        name = "layers.{L}.q"
        shape = "[(a:d|b:1), V~P]"
        as = "q.{}"
        [[tensor]]
        name = "layers.{L in moe}.up.{E}"
        shape = "[F]"
        [[tensor]]
        name = "shared"
        shape = "[S]"
        when = "shared"
        [[tensor]]
        name = "other"
        shape = "[O]"
        optional = true
    "#;
    let table = Table::parse(text).unwrap();
    for key in ["l", "c", "t", "v", "e", "f", "s", "o"] {
        let described = table.describe(Some(&json!({ key: 0 })), &[], None);
        match described {
            Ok(_) => assert!("efso".contains(key), "{key}"),
            Err(error) => {
                assert!(error.to_string().contains("expected a positive integer, got 0"), "{error}");
                assert!("lctv".contains(key), "{key}");
            }
        }
    }
}

#[test]
fn what_is_inherited_and_not_used_is_left_out() {
    let base = r#"
        layout = "base"
        family = "toy"
        [config]
        model_type = ["toy"]
        when = "odd"
        defaults = { toy = { n = 1 } }
        axes = { A = "n", B = "n / m", C = "C_ + 0", D = "d", G = "g" }
        facts = { odd = "n % 2 == 1", used = "inner", inner = "C > 1", tied = "t", loose = "D > 1" }
        [sets]
        s = { where = "L < G", axis = "L" }
        [[tied]]
        tensor = "head"
        to = "a"
        when = "tied"
        [[tensor]]
        name = "a.{L}"
        shape = "[A]"
        when = "!used"
        [[tensor]]
        name = "b"
        shape = "[B]"
    "#;
    let base = Table::parse(base).unwrap();
    let names = |table: &Table| {
        let all = table.config.axes.keys().chain(table.config.facts.keys());
        all.map(String::as_str).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names(&base), "A B C D G inner loose odd tied used");
    let child = "layout = \"child\"\nfamily = \"toy\"\nextends = \"base\"\ndrop = [\"b\"]\n";
    let child = |more: &str| Table::extending(&format!("{child}{more}"), Some(&base)).unwrap();
    let bare = child("");
    assert_eq!(names(&bare), "A C G inner tied used");
    assert!(bare.config.model_types.is_empty() && bare.config.when.is_none() && bare.config.is_declared);
    assert_eq!(bare.config.defaults.len(), 1);
    // Sizes that would not divide are nobody's any more.
    assert!(bare.describe(Some(&json!({"n": 3, "m": 2})), &[], None).is_ok());
    // Its own stay, and what they are made of.
    assert_eq!(names(&child("[config]\nfacts = { mine = \"B > 1\" }\n")), "A B C G inner mine tied used");
    let when = child("[config]\nmodel_type = [\"x\"]\nwhen = \"loose\"\n");
    assert_eq!(names(&when), "A C D G inner loose tied used");
    // An axis that it fixes is no config's any more.
    assert_eq!(names(&child("[axes]\nA = 2\n")), "C G inner tied used");
    let scaled = child("[[tensor]]\nname = \"e\"\nshape = \"[A]\"\nscale = \"sqrt(B)\"\n");
    assert_eq!(names(&scaled), "A B C G inner tied used");
}

#[test]
fn what_is_stored_decides_facts() {
    let table = table(
        "facts = {tied = \"tie ?? false\", head = \"not tied or stored('(model.)head')\", odd = \"none\"}",
        "",
    );
    let facts = |names: &[&str], config: Json| {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        table.describe(Some(&config), &names, None).unwrap().facts
    };
    assert!(facts(&[], json!({}))["head"]);
    assert!(!facts(&["other"], json!({"tie": true}))["head"]);
    assert!(facts(&["model.head"], json!({"tie": true}))["head"]);
    assert!(!facts(&[], json!({})).contains_key("odd"));
    // Without a config: by names that only rules which need it have.
    let without = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        table.describe(None, &names, None).unwrap().facts
    };
    assert_eq!(without(&["layers.0.q"]), Facts::from([("bias".into(), true)]));
    assert_eq!(without(&["layers.0.v"]), Facts::from([("bias".into(), false)]));
}

#[test]
fn sets_of_positions() {
    let table = table(
        "axes = {L = \"n + (more ?? 0)\", E = \"experts\"}",
        r#"
        mtp = { where = "L >= n", optional = true }
        dense = "L < first and L < n or L in (only ?? [])"
        moe = "not dense"
        even = { where = "E > 0 and E % 2 == 0 and L > 0", axis = "E" }
        odd = "not even"
        "#,
    );
    let sets = |config: Json| table.describe(Some(&config), &[], None).unwrap().sets;
    let all = sets(json!({"n": 6, "more": 1, "first": 2, "only": [4, 40], "experts": 5}));
    assert_eq!(all["dense"].positions, [0, 1, 4]);
    assert_eq!(all["moe"].positions, [2, 3, 5, 6]);
    assert_eq!(all["mtp"], Positions { axis: "L".into(), positions: vec![6] });
    assert_eq!(all["even"], Positions { axis: "E".into(), positions: vec![2, 4] });
    assert_eq!(all["odd"], Positions { axis: "E".into(), positions: vec![0, 1, 3] });
    // What the config does not tell is what is seen.
    let some = sets(json!({"n": 6}));
    assert_eq!(some.keys().collect::<Vec<_>>(), ["mtp"]);
    assert!(sets(json!({"first": 2})).is_empty());
    let large = table.describe(Some(&json!({"n": 1 << 20, "first": 1})), &[], None).unwrap_err().to_string();
    assert!(large.contains("positions on axis L"), "{large}");
}

#[test]
fn optional_sets_are_the_last() {
    let table = table("axes.L = \"n\"", "first = { where = \"L < 2\", optional = true }");
    let error = table.describe(Some(&json!({"n": 5})), &[], Some("c.json")).unwrap_err().to_string();
    assert!(
        error.contains("c.json: config: L < 2 (set first of layout toy)") && error.contains("got 0-1"),
        "{error}"
    );
    assert!(table.describe(Some(&json!({"n": 2})), &[], None).is_ok());
}

#[test]
fn refuses_bad_tables() {
    let good = r#"
        layout = "toy"
        family = "toy"
        [axes]
        J = "=H"
        [config]
        axes = { A = "n" }
        facts = { f = "stored('x')", g = "f" }
        [sets]
        s = "L < n"
        [[tensor]]
        name = "layers.{L}.q.{E}"
        shape = "[A, H]"
    "#;
    assert!(Table::parse(good).unwrap().config.is_declared);
    let chain: String = (0..30).map(|i| format!("c{i} = \"c{}\"\n", i + 1)).collect();
    let of_toys = |more: &str| format!("model_type = [\"toy\"]\n{more}\naxes = {{");
    let tall = |n: usize| format!("A = \"{}1\"", "1+".repeat(n));
    for (find, replace, wanted) in [
        ("\"n\"", "\"n +\"", "A: \"n +\": expected a value"),
        ("\"n\"", "\"B\", B = \"A + 1\"", "A is made of itself"),
        ("\"n\"", "\"H\"", "no config states axis H"),
        ("A = \"n\"", "J = \"n\"", "axis J has its extent from another"),
        ("\"n\"", "\"s\"", "s is a set"),
        ("\"n\"", "\"int(stored('x'))\"", "stored() is for facts"),
        ("\"n\"", "\"int(g)\"", "stored() is for facts"),
        ("\"L < n\"", "\"n > 2\"", "set s: it speaks of no axis"),
        ("\"L < n\"", "\"L < E\"", "it speaks of the axes E, L"),
        ("\"L < n\"", "{ where = \"L < E\", axis = \"L\" }", "no config states axis E"),
        ("\"L < n\"", "{ where = \"L < n\", axes = \"L\" }", "`where`"),
        (
            "s = \"L < n\"",
            "s = \"L < 2\"\nt = { where = \"s\", axis = \"E\" }",
            "s is a set of positions on L",
        ),
        ("s = \"L < n\"", "s = \"not t\"\nt = \"not s and L > 1\"", "s is made of itself"),
        ("s = \"L", "f = \"L", "f is two of"),
        ("f = \"stored", "E = \"stored", "E is two of"),
        ("model", "modell", ""),
        (
            "facts = {",
            &format!("facts = {{ {} ", chain.trim_end().replace('\n', ", ") + ","),
            "deeper than 16",
        ),
        ("axes = {", "when = \"n > 1\"\naxes = {", "there is none"),
        ("axes = {", &of_toys("when = \"f\""), "stored() is for facts: what is stored decides no table"),
        ("axes = {", &of_toys("when = \"s\""), "when \"s\": s is a set"),
        ("axes = {", &of_toys("when = \"n >\""), "when \"n >\": expected a value"),
        ("axes = {", &of_toys("defaults = { toys = { n = 1 } }"), "defaults of toys, which is no model_type"),
        ("axes = {", &of_toys("defaults = { toy = { n = 1 } }"), ""),
        ("axes = {", "defaults = { toys = { n = 1 } }\naxes = {", ""),
        ("A = \"n\"", &tall(250), ""),
        (
            "A = \"n\"",
            &format!("A = \"B{0}\", B = \"C{0}\", C = \"1{0}\"", "+1".repeat(240)),
            "deeper than 512",
        ),
    ] {
        let text = good.replace(find, replace);
        match Table::parse(&text) {
            Ok(_) => assert!(wanted.is_empty(), "{wanted:?} was not refused"),
            Err(error) => {
                let message = error.to_string();
                assert!(!wanted.is_empty() && message.contains(wanted), "{wanted:?} not in {message}");
            }
        }
    }
}

#[test]
fn evaluation_ends() {
    let doubled: String = (0..14).map(|i| format!("s{i} = \"s{} and s{}\"\n", i + 1, i + 1)).collect();
    let table = table("axes.L = \"n\"", &format!("{doubled} s14 = \"L in list\""));
    let config = json!({"n": 1000, "list": (0..1000).collect::<Vec<u64>>()});
    let error = table.describe(Some(&config), &[], None).unwrap_err().to_string();
    assert!(error.contains("too large"), "{error}");
}

fn values() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        prop::sample::select(vec![0, 1, -1, 2, 3, i64::MAX, i64::MIN]).prop_map(Json::from),
        prop::sample::select(vec![0.5, -1e300, 9e18]).prop_map(Json::from),
        Just(json!("x")),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Json::from),
            prop::collection::btree_map("[a-c]", inner, 0..3).prop_map(|map| json!(map)),
        ]
    })
}

fn expressions() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "0",
        "1",
        "2",
        "9223372036854775807",
        "true",
        "false",
        "null",
        "'x'",
        "a",
        "b",
        "c",
        "has(a.b)",
        "stored('x')",
        "[]",
    ]);
    leaf.prop_map(str::to_string).prop_recursive(4, 24, 2, |inner| {
        let ops = ["+", "-", "*", "/", "//", "%", "<", ">=", "==", "!=", "in", "and", "or", "??"];
        prop_oneof![
            (inner.clone(), prop::sample::select(ops.to_vec()), inner.clone())
                .prop_map(|(a, op, b)| format!("({a}) {op} ({b})")),
            inner.clone().prop_map(|a| format!("not ({a})")),
            inner.clone().prop_map(|a| format!("int({a})")),
            inner.clone().prop_map(|a| format!("len({a})")),
            inner.clone().prop_map(|a| format!("({a}).b")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a})[{b}]")),
            (inner.clone(), inner).prop_map(|(a, b)| format!("[{a}, {b}]")),
        ]
    })
}

/// The smallest number has no opposite: a quotient by -1 is refused, a rest is not.
#[test]
fn the_smallest_number() {
    let config = json!({"a": i64::MIN, "b": -1});
    assert_eq!(fact("a % b == 0", &config), Ok(Some(true)));
    for text in ["a / b", "a // b", "a * b", "0 - a"] {
        let message = fact(&format!("{text} > 1"), &config).unwrap_err();
        assert!(message.contains("64 bits"), "{text}: {message}");
    }
}

/// The shortest evaluation that is right, over wide numbers; `None` for what is refused.
fn oracle(text: &str, config: &Json) -> Option<Option<bool>> {
    let (a, rest) = text.split_once(' ')?;
    let (op, b) = rest.split_once(' ')?;
    let number = |key: &str| match key.parse::<i128>() {
        Ok(n) => Some(Some(n)),
        Err(_) => match config.get(key) {
            None | Some(Json::Null) => Some(None),
            Some(value) => value.as_i64().map(|n| Some(i128::from(n))),
        },
    };
    let (a, b) = (number(a)?, number(b)?);
    let (Some(a), Some(b)) = (a, b) else { return Some(None) };
    let fits = |n: i128| i64::try_from(n).is_ok().then_some(n);
    let value = match op {
        "+" => fits(a + b)?,
        "-" => fits(a - b)?,
        "*" => fits(a * b)?,
        "/" => fits((b != 0 && a % b == 0).then(|| a / b)?)?,
        "//" => fits((b != 0).then(|| (a - (a % b + b) % b) / b)?)?,
        _ => (b != 0).then(|| (a % b + b) % b)?,
    };
    Some(Some(value > 1))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    /// Whatever the config is, an expression has a value or is refused.
    #[test]
    fn no_config_breaks_evaluation(
        text in expressions(),
        config in prop::collection::btree_map("[a-c]", values(), 0..4).prop_map(|map| json!(map)),
    ) {
        if Expression::parse(&text).is_ok() {
            let _ = fact(&text, &config);
            let _ = fact(&format!("int({text}) > 1"), &config);
        }
    }

    #[test]
    fn arithmetic_is_exact(
        a in prop::sample::select(vec!["a", "b", "c", "0", "3", "7"]),
        op in prop::sample::select(vec!["+", "-", "*", "/", "//", "%"]),
        b in prop::sample::select(vec!["a", "b", "c", "0", "3", "7"]),
        values in prop::collection::vec(prop_oneof![any::<i64>(), -9i64..9, Just(i64::MIN)], 2),
    ) {
        let config = json!({"a": values[0], "b": values[1]});
        let text = format!("{a} {op} {b}");
        prop_assert_eq!(fact(&format!("{text} > 1"), &config).ok(), oracle(&text, &config));
    }
}

#[test]
fn a_key_that_the_config_itself_states_is_sought_in_no_part() {
    let text = r#"
        layout = "tower"
        family = "toy"
        [config]
        model_type = ["tower"]
        within = ["text_config"]
        outside = ["tie"]
        defaults.tower = { tie = true }
        defaults.text = { tie = false, wide = true }
        facts = { tied = "tie", wide = "wide" }
        [[tensor]]
        name = "head"
        shape = "[H]"
        when = "tied & wide"
    "#;
    let table = Table::parse(text).unwrap();
    for (config, tied) in [
        (json!({"model_type": "tower", "tie": true, "text_config": {"tie": false}}), true),
        (json!({"model_type": "tower", "tie": false, "text_config": {"tie": true}}), false),
        (json!({"model_type": "tower", "text_config": {"tie": false, "model_type": "text"}}), true),
    ] {
        let facts = table.describe(Some(&config), &[], None).unwrap().facts;
        assert_eq!(facts.get("tied"), Some(&tied), "{config}");
    }
    let inner = json!({"model_type": "tower", "text_config": {"model_type": "text"}});
    let facts = table.describe(Some(&inner), &[], None).unwrap().facts;
    assert_eq!(facts, Facts::from([("tied".into(), true), ("wide".into(), true)]));
}
