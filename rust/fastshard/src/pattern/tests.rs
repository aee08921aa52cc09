use super::*;

fn first(patterns: &[&str], how: How, name: &str) -> Result<Option<usize>, Error> {
    let budget = Arc::new(Budget::new("config.json", MOST_STEPS));
    Patterns::new(patterns.iter().map(ToString::to_string).collect(), how, budget)?.first(name)
}

fn refusal(pattern: &str, name: &str) -> Finding {
    first(&[pattern], How::Start, name).unwrap_err().into_findings().remove(0)
}

#[test]
fn the_first_that_matches_decides() {
    let patterns = ["q_proj", r"layers\.\d+\.q_proj", "(?:k|q)_proj", "."];
    assert_eq!(first(&patterns, How::Module, "model.layers.3.q_proj").unwrap(), Some(0));
    assert_eq!(first(&patterns[1..], How::Module, "model.layers.3.q_proj").unwrap(), Some(0));
    assert_eq!(first(&patterns[2..], How::Module, "model.layers.3.my_q_proj").unwrap(), None);
    assert_eq!(first(&patterns[3..], How::Full, "ab").unwrap(), None);
    assert_eq!(first(&patterns[3..], How::Start, "ab").unwrap(), Some(0));
}

#[test]
fn alternatives_within_alternatives_take_a_step_for_each_character() {
    let pattern = format!("{}b", "(a|a)".repeat(40));
    let budget = Arc::new(Budget::new("config.json", 1_000_000));
    let patterns =
        Patterns::new(vec![pattern, "(a+)+$".into(), ".*.*.*b".into()], How::Start, budget).unwrap();
    assert_eq!(patterns.first(&"a".repeat(40)).unwrap(), Some(1));
    assert_eq!(patterns.first(&format!("{}.", "a".repeat(3000))).unwrap(), None);
    assert!(patterns.budget.taken() < 1_000_000, "{}", patterns.budget.taken());
}

#[test]
fn what_goes_back_for_ever_ends_with_the_budget() {
    let parts = format!(r"{}\1\2\3\4\5(?=x)", "(.*)".repeat(9));
    for (pattern, name) in [("(x+x+)+y(?!z)", "x"), (parts.as_str(), "ab")] {
        let found = refusal(pattern, &name.repeat(60));
        assert!(found.code == codes::UNSUPPORTED && found.got.as_deref() == Some(pattern), "{found:?}");
        assert_eq!(found.file.as_deref(), Some("config.json"));
    }
}

#[test]
fn very_many_patterns_end_with_the_budget() {
    let budget = Arc::new(Budget::new("config.json", MOST_STEPS));
    let all = (0..20_000).map(|n| format!(r"model\.layers\.{n}\.(q|k){{0,{}}}[a-z]*$", n % 40)).collect();
    let patterns = Patterns::new(all, How::Start, Arc::clone(&budget)).unwrap();
    let error =
        (0..2000).find_map(|n| patterns.first(&format!("model.layers.{n}.mlp.up_proj.9")).err()).unwrap();
    assert_eq!(error.into_findings()[0].code, codes::UNSUPPORTED);
}

#[test]
fn a_hundred_thousand_names_are_within_the_budget() {
    let budget = Arc::new(Budget::new("config.json", MOST_STEPS));
    let all = (0..100_000).map(|n| format!("model.layers.{n}.q_proj")).collect();
    let patterns = Patterns::new(all, How::Module, budget).unwrap();
    for n in (0..100_000).step_by(101) {
        assert_eq!(patterns.first(&format!("base.model.layers.{n}.q_proj")).unwrap(), Some(n));
    }
}

#[test]
fn what_python_refuses_or_no_engine_has_is_named() {
    for (pattern, code, words) in [
        ("(", codes::BAD_VALUE, "unterminated"),
        ("*a", codes::BAD_VALUE, "nothing to repeat"),
        ("a**", codes::BAD_VALUE, "multiple repeat"),
        ("a(?i)", codes::BAD_VALUE, "global flags"),
        (r"\y", codes::BAD_VALUE, "bad escape"),
        (r"\p{L}", codes::BAD_VALUE, "bad escape"),
        ("(?<n>a)", codes::BAD_VALUE, "unknown extension"),
        (r"(a\1)", codes::BAD_VALUE, "open group"),
        ("(?<=a*)b", codes::BAD_VALUE, "look-behind"),
        ("[b-a]", codes::BAD_VALUE, "range"),
        ("(a)(?(1)b|c)", codes::UNSUPPORTED, "condition"),
        ("(a+?)*+", codes::UNSUPPORTED, "lazy"),
        ("(?x) a", codes::UNSUPPORTED, "(?x)"),
        (r"a\B", codes::UNSUPPORTED, r"\B"),
        ("(((a{99}){99}){99}){99}", codes::UNSUPPORTED, "states"),
    ] {
        let found = refusal(pattern, "name");
        assert!(found.code == code && found.message.contains(words), "{pattern}: {found:?}");
    }
    let found = refusal(&"(".repeat(100_000), "name");
    assert!(found.code == codes::UNSUPPORTED && found.got.is_some_and(|got| got.len() < 200));
}

#[test]
fn patterns_that_people_write_are_matched() {
    for (pattern, name, is_match) in [
        (r"^(?!.*vision).*(?:q_proj|v_proj)", "model.layers.0.self_attn.q_proj", true),
        (r"^(?!.*vision).*(?:q_proj|v_proj)", "model.vision.layers.0.self_attn.q_proj", false),
        (r"^(language_model(?=\.).*)$", "language_model.layers.0.q_proj", true),
        (r"^(language_model(?=\.).*)$", "language_models.layers.0.q_proj", false),
        (r"(?i).*Q_PROJ\Z", "model.q_proj", true),
        (r"(?P<p>q|k)_proj_(?P=p)$", "k_proj_k", true),
        (r"(?P<p>q|k)_proj_(?P=p)$", "k_proj_q", false),
        (r".*\.(?:1\d)\..*(gate|up).*", "model.layers.12.mlp.up_proj", true),
        (r"\w+$", "a\n", true),
        (r"\w+\Z", "a\n", false),
        (r"\w+$", "größe", true),
        (r"(?a)\w+$", "größe", false),
    ] {
        assert_eq!(first(&[pattern], How::Start, name).unwrap(), is_match.then_some(0), "{pattern} {name}");
    }
}
