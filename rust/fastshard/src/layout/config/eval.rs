//! Values of expressions: three-valued, exact in 64 bits, and done after a bounded number of steps.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use serde_json::Value as Json;

use super::parse::{Expression, Kind, Node, Op};
use super::Config;
use crate::layout::expr::Extents;
use crate::layout::names::Pattern;

/// Largest extent of an axis.
const MAX_EXTENT: i64 = 1 << 40;
/// Steps of one description of a model: far more than any table needs, few enough to be over at once.
const MAX_STEPS: u32 = 1 << 24;
/// Whole numbers below it are exact as floats.
const EXACT: f64 = 9_007_199_254_740_992.0;

/// What an expression comes to.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value<'a> {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(&'a str),
    List(Rc<Vec<Value<'a>>>),
    /// An array or an object of the config.
    Json(&'a Json),
}

/// What keeps an expression from having a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wrong {
    /// The part of the expression, as it is written.
    pub(super) at: String,
    pub(super) expected: String,
    pub(super) got: String,
}

type Evaluated<'a> = Result<Value<'a>, Wrong>;

impl<'a> From<&'a Json> for Value<'a> {
    fn from(json: &'a Json) -> Self {
        match json {
            Json::Null => Value::Null,
            Json::Bool(b) => Value::Bool(*b),
            Json::Number(n) => match n.as_i64() {
                Some(n) => Value::Int(n),
                None => Value::Float(n.as_f64().unwrap_or(f64::INFINITY)),
            },
            Json::String(text) => Value::Text(text),
            Json::Array(_) | Json::Object(_) => Value::Json(json),
        }
    }
}

impl Value<'_> {
    /// The value as messages show it.
    pub(super) fn shown(&self) -> String {
        let text = match self {
            Value::Null => "null".into(),
            Value::Bool(b) => b.to_string(),
            Value::Int(n) => n.to_string(),
            Value::Float(n) => format!("{n:?}"),
            Value::Text(text) => format!("{text:?}"),
            Value::List(items) => format!("a list of {}", items.len()),
            Value::Json(Json::Array(items)) => format!("a list of {}", items.len()),
            Value::Json(_) => "an object".into(),
        };
        match text.char_indices().nth(60) {
            Some((cut, _)) => format!("{}...", &text[..cut]),
            None => text,
        }
    }
}

/// What expressions are evaluated against.
pub(super) struct Scope<'a> {
    pub(super) rules: &'a Config,
    pub(super) fixed: &'a Extents,
    /// The config; none if there is none.
    pub(super) config: &'a Json,
    /// True if a tensor of such a name is stored.
    pub(super) stored: &'a dyn Fn(&Pattern) -> bool,
    /// Axes and facts that were asked for.
    memo: RefCell<HashMap<&'a str, Evaluated<'a>>>,
    steps: Cell<u32>,
}

/// Where an expression of a set stands: the axis, and the position on it.
pub(super) type At<'a> = Option<(&'a str, u64)>;

fn wrong<T>(at: &str, expected: impl Into<String>, got: impl Into<String>) -> Result<T, Wrong> {
    Err(Wrong { at: at.to_string(), expected: expected.into(), got: got.into() })
}

impl<'a> Scope<'a> {
    pub(super) fn new(
        rules: &'a Config,
        fixed: &'a Extents,
        config: &'a Json,
        stored: &'a dyn Fn(&Pattern) -> bool,
    ) -> Scope<'a> {
        let memo = RefCell::new(HashMap::new());
        Scope { rules, fixed, config, stored, memo, steps: Cell::new(MAX_STEPS) }
    }

    fn step(&self, text: &str) -> Result<(), Wrong> {
        match self.steps.get().checked_sub(1) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => wrong(text, format!("a value after {MAX_STEPS} steps"), "none: the config is too large"),
        }
    }

    /// The value of the expression of an axis, a fact or a set.
    pub(super) fn value(&self, own: &'a str, expression: &'a Expression, at: At<'a>) -> Evaluated<'a> {
        Evaluation { scope: self, own, expression, at, floats: false }.of(&expression.root)
    }

    /// The extent of an axis, or a fact; evaluated once.
    pub(super) fn named(&self, name: &'a str, expression: &'a Expression) -> Evaluated<'a> {
        if let Some(known) = self.memo.borrow().get(name) {
            return known.clone();
        }
        let is_axis = self.rules.axes.contains_key(name);
        let least = i64::from(self.rules.positive.contains(name));
        let value = self.value(name, expression, None).and_then(|value| match value {
            Value::Null => Ok(value),
            Value::Int(n) if is_axis && (least..=MAX_EXTENT).contains(&n) => Ok(value),
            Value::Bool(_) if !is_axis => Ok(value),
            _ if is_axis && least == 1 => wrong(expression.text(), "a positive integer", value.shown()),
            _ if is_axis => wrong(expression.text(), "an integer of 0 or more", value.shown()),
            _ => wrong(expression.text(), "true or false", value.shown()),
        });
        self.memo.borrow_mut().insert(name, value.clone());
        value
    }

    /// Finds the value of a key in the config, where it is sought: the first that is not null; none if it is nowhere.
    fn find_value(&self, name: &str) -> Option<&'a Json> {
        let config = self.config;
        let inner = |path: &String| path.split('.').try_fold(config, |object, key| object.get(key));
        let within: &[String] = if self.is_outside(name) { &[] } else { &self.rules.within };
        let places = within.iter().filter_map(inner).chain(std::iter::once(config));
        let mut found = None;
        for value in places.filter_map(|object| object.get(name)) {
            if !value.is_null() {
                return Some(value);
            }
            found = Some(value);
        }
        found
    }

    /// True for a key that the config itself states.
    fn is_outside(&self, name: &str) -> bool {
        self.rules.outside.iter().any(|key| key == name)
    }

    /// A key of the config; one that it leaves out is what the model type has for it, or null.
    fn key(&self, name: &str) -> Value<'a> {
        let value = self.find_value(name).or_else(|| {
            let own = self.is_outside(name).then(|| self.config.get("model_type")).flatten();
            let kind = own.or_else(|| self.find_value("model_type"))?.as_str()?;
            self.rules.defaults.get(kind)?.get(name)
        });
        value.map_or(Value::Null, Value::from)
    }
}

/// One expression at one position.
struct Evaluation<'s, 'a> {
    scope: &'s Scope<'a>,
    /// What it is the expression of: in it, that name is a key of the config.
    own: &'a str,
    expression: &'a Expression,
    at: At<'a>,
    /// True inside `int()`.
    floats: bool,
}

impl<'a> Evaluation<'_, 'a> {
    fn of(&self, node: &'a Node) -> Evaluated<'a> {
        let text = self.expression.text_of(node);
        self.scope.step(text)?;
        match &node.kind {
            Kind::Null => Ok(Value::Null),
            Kind::Bool(b) => Ok(Value::Bool(*b)),
            Kind::Int(n) => Ok(Value::Int(*n)),
            Kind::Text(text) => Ok(Value::Text(text)),
            Kind::List(items) => {
                Ok(Value::List(Rc::new(items.iter().map(|item| self.of(item)).collect::<Result<_, _>>()?)))
            }
            Kind::Name(name) => self.name(name),
            Kind::Field(inner, name) => match self.of(inner)? {
                Value::Null => Ok(Value::Null),
                Value::Json(object @ Json::Object(_)) => {
                    Ok(object.get(name).map_or(Value::Null, Value::from))
                }
                other => wrong(self.expression.text_of(inner), "an object", other.shown()),
            },
            Kind::Item(list, item) => self.item(text, list, item),
            Kind::Has(path) => Ok(Value::Bool(self.has(path))),
            Kind::Int64(inner) => {
                let inner = Evaluation { floats: true, ..*self }.of(inner)?;
                self.whole(text, inner)
            }
            Kind::Length(list) => match self.of(list)? {
                Value::Null => Ok(Value::Null),
                Value::List(items) => Ok(Value::Int(items.len() as i64)),
                Value::Json(Json::Array(items)) => Ok(Value::Int(items.len() as i64)),
                other => wrong(self.expression.text_of(list), "a list", other.shown()),
            },
            Kind::Stored(pattern) => Ok(Value::Bool((self.scope.stored)(pattern))),
            Kind::Not(inner) => Ok(self.truth(inner)?.map_or(Value::Null, |truth| Value::Bool(!truth))),
            Kind::Binary(Op::Coalesce, a, b) => match self.of(a)? {
                Value::Null => self.of(b),
                value => Ok(value),
            },
            Kind::Binary(op @ (Op::And | Op::Or), a, b) => {
                // The value that decides, whatever the other one is.
                let decides = *op == Op::Or;
                let left = self.truth(a)?;
                if left == Some(decides) {
                    return Ok(Value::Bool(decides));
                }
                let right = self.truth(b)?;
                Ok(match (left, right) {
                    (_, Some(right)) if right == decides => Value::Bool(decides),
                    (Some(_), Some(_)) => Value::Bool(!decides),
                    _ => Value::Null,
                })
            }
            Kind::Binary(op, a, b) => self.operate(*op, text, a, b),
        }
    }

    /// A position, an axis, a fact, a set at the position, or a key.
    fn name(&self, name: &'a str) -> Evaluated<'a> {
        let rules = self.scope.rules;
        if let Some((_, position)) = self.at.filter(|(axis, _)| *axis == name) {
            return Ok(Value::Int(position as i64));
        }
        if name == self.own {
            return Ok(self.scope.key(name));
        }
        if let Some((name, expression)) = rules.axes.get_key_value(name) {
            return self.scope.named(name, expression);
        }
        if let Some(extent) = self.scope.fixed.get(name) {
            return Ok(i64::try_from(*extent).map_or(Value::Null, Value::Int));
        }
        if let Some((name, expression)) = rules.facts.get_key_value(name) {
            return self.scope.named(name, expression);
        }
        match rules.sets.get_key_value(name) {
            Some((name, set)) => self.scope.value(name, &set.holds, self.at),
            None => Ok(self.scope.key(name)),
        }
    }

    fn has(&self, path: &[String]) -> bool {
        let Some((first, rest)) = path.split_first() else { return false };
        rest.iter().fold(self.scope.key(first), |value, key| match value {
            Value::Json(json) => json.get(key).map_or(Value::Null, Value::from),
            _ => Value::Null,
        }) != Value::Null
    }

    fn item(&self, text: &str, list: &'a Node, item: &'a Node) -> Evaluated<'a> {
        let (of, at) = (self.of(list)?, self.of(item)?);
        let length = match &of {
            Value::Null => return Ok(Value::Null),
            Value::List(items) => items.len(),
            Value::Json(Json::Array(items)) => items.len(),
            other => return wrong(self.expression.text_of(list), "a list", other.shown()),
        };
        let at = match at {
            Value::Null => return Ok(Value::Null),
            Value::Int(at) => at,
            other => return wrong(self.expression.text_of(item), "an integer", other.shown()),
        };
        let found = usize::try_from(at).ok().and_then(|at| match &of {
            Value::List(items) => items.get(at).cloned(),
            Value::Json(json) => json.get(at).map(Value::from),
            _ => None,
        });
        found.map_or_else(
            || wrong(text, format!("a list of more than {at}"), format!("a list of {length}")),
            Ok,
        )
    }

    /// A float cut to an integer.
    fn whole(&self, text: &str, value: Value<'a>) -> Evaluated<'a> {
        match value {
            Value::Null | Value::Int(_) => Ok(value),
            Value::Float(n) if n.is_finite() && n.abs() < EXACT => Ok(Value::Int(n.trunc() as i64)),
            other => wrong(text, "a number below 2^53", other.shown()),
        }
    }

    fn truth(&self, node: &'a Node) -> Result<Option<bool>, Wrong> {
        match self.of(node)? {
            Value::Null => Ok(None),
            Value::Bool(truth) => Ok(Some(truth)),
            other => wrong(self.expression.text_of(node), "true or false", other.shown()),
        }
    }

    fn operate(&self, op: Op, text: &str, a: &'a Node, b: &'a Node) -> Evaluated<'a> {
        let (left, right) = (self.of(a)?, self.of(b)?);
        if left == Value::Null || right == Value::Null {
            return Ok(Value::Null);
        }
        let sides = [(a, &left), (b, &right)];
        match op {
            Op::Equal => Ok(Value::Bool(self.equal(text, &left, &right)?)),
            Op::Unequal => Ok(Value::Bool(!self.equal(text, &left, &right)?)),
            Op::In => self.within(b, &left, &right),
            _ => {
                for (node, value) in sides {
                    let number =
                        matches!(value, Value::Int(_)) || self.floats && matches!(value, Value::Float(_));
                    if !number {
                        return wrong(self.expression.text_of(node), "an integer", value.shown());
                    }
                }
                match (left, right) {
                    (Value::Int(x), Value::Int(y)) => self.integers(op, text, x, y),
                    (x, y) => self.floats(op, text, &x, &y),
                }
            }
        }
    }

    fn within(&self, list: &'a Node, left: &Value<'a>, right: &Value<'a>) -> Evaluated<'a> {
        let text = self.expression.text_of(list);
        let same = |item: &Value<'a>| {
            self.scope.step(text)?;
            Ok(*item != Value::Null && self.equal(text, left, item)?)
        };
        let mut found = false;
        match right {
            Value::List(items) => {
                for item in items.iter() {
                    found |= same(item)?;
                }
            }
            Value::Json(Json::Array(items)) => {
                for item in items {
                    found |= same(&Value::from(item))?;
                }
            }
            other => return wrong(text, "a list", other.shown()),
        }
        Ok(Value::Bool(found))
    }

    /// Whether two values of one kind are equal.
    fn equal(&self, text: &str, a: &Value<'a>, b: &Value<'a>) -> Result<bool, Wrong> {
        match (a, b) {
            (Value::Bool(x), Value::Bool(y)) => Ok(x == y),
            (Value::Int(x), Value::Int(y)) => Ok(x == y),
            (Value::Text(x), Value::Text(y)) => Ok(x == y),
            _ => {
                let sides = format!("{} and {}", a.shown(), b.shown());
                wrong(text, "two integers, two texts or two of true and false", sides)
            }
        }
    }

    fn integers(&self, op: Op, text: &str, x: i64, y: i64) -> Evaluated<'a> {
        let by_zero = matches!(op, Op::Divide | Op::FloorDivide | Op::Remainder) && y == 0;
        if by_zero {
            return wrong(text, "a number to divide by that is not 0", format!("{x} by 0"));
        }
        let number = match op {
            Op::Less => return Ok(Value::Bool(x < y)),
            Op::LessEqual => return Ok(Value::Bool(x <= y)),
            Op::Greater => return Ok(Value::Bool(x > y)),
            Op::GreaterEqual => return Ok(Value::Bool(x >= y)),
            Op::Add => x.checked_add(y),
            Op::Subtract => x.checked_sub(y),
            Op::Multiply => x.checked_mul(y),
            Op::Divide if x.checked_rem(y).is_some_and(|rest| rest != 0) => {
                return match self.floats {
                    true => self.floats(op, text, &Value::Int(x), &Value::Int(y)),
                    false => wrong(text, format!("a multiple of {y}"), x.to_string()),
                }
            }
            Op::Divide => x.checked_div(y),
            // Both as Python has them: towards minus infinity.
            Op::FloorDivide => x.checked_div(y).map(|n| n - i64::from(x % y != 0 && (x < 0) != (y < 0))),
            _ => {
                // The smallest number by -1 has no quotient, but it has a rest.
                let n = x.wrapping_rem(y);
                Some(if n != 0 && (n < 0) != (y < 0) { n + y } else { n })
            }
        };
        number.map_or_else(|| wrong(text, "a number of 64 bits", "a larger one"), |n| Ok(Value::Int(n)))
    }

    /// Arithmetic inside `int()`, where a config states a ratio.
    fn floats(&self, op: Op, text: &str, x: &Value<'a>, y: &Value<'a>) -> Evaluated<'a> {
        let float = |value: &Value<'a>| match value {
            Value::Float(n) => Ok(*n),
            Value::Int(n) if (*n as f64).abs() < EXACT => Ok(*n as f64),
            other => wrong(text, "numbers below 2^53", other.shown()),
        };
        let (x, y) = (float(x)?, float(y)?);
        Ok(match op {
            Op::Less => Value::Bool(x < y),
            Op::LessEqual => Value::Bool(x <= y),
            Op::Greater => Value::Bool(x > y),
            Op::GreaterEqual => Value::Bool(x >= y),
            Op::Add => Value::Float(x + y),
            Op::Subtract => Value::Float(x - y),
            Op::Multiply => Value::Float(x * y),
            Op::Divide => Value::Float(x / y),
            Op::FloorDivide => Value::Float((x / y).floor()),
            _ => Value::Float(x - y * (x / y).floor()),
        })
    }
}
