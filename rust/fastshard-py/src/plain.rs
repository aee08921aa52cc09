//! Records across the border: objects with attributes, or dicts whose keys `_core.pyi` states; lists, texts and numbers in them.

use std::fmt;

use fastshard::codes;
use fastshard::error::Finding;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PySet, PyString, PyTuple};
use serde::de::value::StrDeserializer;
use serde::de::{self, DeserializeOwned, DeserializeSeed, IntoDeserializer, Visitor};
use serde::Serialize;
use serde_json::Value;

use crate::raise;

/// What is nested deeper is no option of anybody's.
const DEPTH: usize = 128;

/// A record that Python passes as an object or a dict.
pub(crate) struct Given<T>(pub(crate) T);

impl<'py, T: DeserializeOwned> FromPyObject<'_, 'py> for Given<T> {
    type Error = PyErr;

    /// Raises `FS515` for what no option can be: a number that is too large or none, a text that is no UTF-8.
    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        T::deserialize(Object { given: &given, depth: 0 }).map(Given).map_err(|Unusable(why)| {
            raise(Finding::new(codes::USAGE, format!("an option holds what cannot be used: {why}")).into())
        })
    }
}

/// Why a record cannot be read.
#[derive(Debug)]
struct Unusable(String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unusable {}

impl de::Error for Unusable {
    fn custom<T: fmt::Display>(why: T) -> Self {
        Unusable(why.to_string())
    }
}

impl From<PyErr> for Unusable {
    fn from(error: PyErr) -> Self {
        Unusable(error.to_string())
    }
}

/// A text, borrowed from Python.
fn text<'a>(given: &'a Bound<'_, PyString>) -> Result<&'a str, Unusable> {
    given.to_str().map_err(|_| Unusable("a text that is no UTF-8".into()))
}

/// True for an object whose attributes are read: a dataclass, whose `__dataclass_fields__` Python makes late.
fn is_record(given: &Bound<'_, PyAny>) -> PyResult<bool> {
    let is_collection = given.is_instance_of::<PyDict>() || given.is_instance_of::<PyTuple>();
    Ok(!is_collection && given.hasattr(intern!(given.py(), "__match_args__"))?)
}

/// A value of Python's, read as serde asks for it.
struct Object<'a, 'py> {
    given: &'a Bound<'py, PyAny>,
    depth: usize,
}

impl<'de> de::Deserializer<'de> for Object<'_, '_> {
    type Error = Unusable;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unusable> {
        let (given, depth) = (self.given, self.depth + 1);
        if depth > DEPTH {
            return Err(Unusable("it is nested too deeply".into()));
        }
        if given.is_none() {
            visitor.visit_unit()
        } else if let Ok(given) = given.cast::<PyBool>() {
            visitor.visit_bool(given.is_true())
        } else if given.is_instance_of::<PyInt>() {
            match (given.extract::<u64>(), given.extract::<i64>(), given.extract::<f64>()) {
                (Ok(number), ..) => visitor.visit_u64(number),
                (_, Ok(number), _) => visitor.visit_i64(number),
                // As JSON readers take it: where an integer is asked for, it is refused.
                (.., Ok(number)) if number.is_finite() => visitor.visit_f64(number),
                _ => Err(Unusable(format!("{given} is beyond all numbers"))),
            }
        } else if let Ok(number) = given.cast::<PyFloat>() {
            match number.value().is_finite() {
                true => visitor.visit_f64(number.value()),
                false => Err(Unusable(format!("{given} is no number"))),
            }
        } else if let Ok(given) = given.cast::<PyString>() {
            visitor.visit_str(text(given)?)
        } else if let Ok(given) = given.cast::<PyDict>() {
            visitor.visit_map(Items { items: given.iter(), value: None, depth })
        } else if given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>() {
            visitor.visit_seq(Elements { left: given.len()?, items: given.try_iter()?, depth })
        } else {
            Err(Unusable(format!("a value of type {}", given.get_type())))
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unusable> {
        match self.given.is_none() {
            true => visitor.visit_none(),
            false => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unusable> {
        visitor.visit_newtype_struct(self)
    }

    /// A word, a dict of one word and what belongs to it, or an object, whose class is the word.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unusable> {
        if let Ok(word) = self.given.cast::<PyString>() {
            let word: StrDeserializer<'_, Unusable> = text(word)?.into_deserializer();
            return visitor.visit_enum(word);
        }
        if is_record(self.given)? {
            return visitor.visit_enum(Class { given: self.given, depth: self.depth + 1 });
        }
        let given = self.given.cast::<PyDict>().map_err(|_| Unusable(format!("no word: {}", self.given)))?;
        let items = Items { items: given.iter(), value: None, depth: self.depth + 1 };
        visitor.visit_enum(de::value::MapAccessDeserializer::new(items))
    }

    /// A set too, which has no order: what keeps all that is given does not take one.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unusable> {
        let given = self.given;
        if !(given.is_instance_of::<PySet>() || given.is_instance_of::<PyFrozenSet>()) {
            return self.deserialize_any(visitor);
        }
        visitor.visit_seq(Elements { left: given.len()?, items: given.try_iter()?, depth: self.depth + 1 })
    }

    /// A dict, or an object: of its attributes those that are asked for, which it may have more of.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unusable> {
        let given = self.given;
        match is_record(given)? {
            false => self.deserialize_any(visitor),
            true if self.depth >= DEPTH => Err(Unusable(format!("{name} is nested too deeply"))),
            true => visitor.visit_map(Attributes {
                given,
                names: fields.iter(),
                value: None,
                depth: self.depth + 1,
            }),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        tuple tuple_struct map identifier ignored_any
    }
}

/// The attributes of a dataclass that a record of the core's has by the same names.
struct Attributes<'a, 'py> {
    given: &'a Bound<'py, PyAny>,
    names: std::slice::Iter<'static, &'static str>,
    value: Option<Bound<'py, PyAny>>,
    depth: usize,
}

impl<'de> de::MapAccess<'de> for Attributes<'_, '_> {
    type Error = Unusable;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Unusable> {
        for &name in self.names.by_ref() {
            if let Some(value) = self.given.getattr_opt(name)? {
                self.value = Some(value);
                let key: StrDeserializer<'_, Unusable> = name.into_deserializer();
                return seed.deserialize(key).map(Some);
            }
        }
        Ok(None)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Unusable> {
        let value = self.value.take().ok_or_else(|| Unusable("a value without a name".into()))?;
        seed.deserialize(Object { given: &value, depth: self.depth })
    }
}

/// A dataclass that is one of several records: `LowRank` is the variant `low_rank`.
struct Class<'a, 'py> {
    given: &'a Bound<'py, PyAny>,
    depth: usize,
}

impl<'a, 'de, 'py> de::EnumAccess<'de> for Class<'a, 'py> {
    type Error = Unusable;
    type Variant = Object<'a, 'py>;

    fn variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<(S::Value, Self::Variant), Unusable> {
        let class = self.given.get_type().name()?;
        let mut word = String::new();
        for (i, letter) in text(&class)?.chars().enumerate() {
            if letter.is_uppercase() && i > 0 {
                word.push('_');
            }
            word.extend(letter.to_lowercase());
        }
        let word: StrDeserializer<'_, Unusable> = word.as_str().into_deserializer();
        Ok((seed.deserialize(word)?, Object { given: self.given, depth: self.depth }))
    }
}

impl<'de> de::VariantAccess<'de> for Object<'_, '_> {
    type Error = Unusable;

    fn unit_variant(self) -> Result<(), Unusable> {
        Ok(())
    }

    fn newtype_variant_seed<S: DeserializeSeed<'de>>(self, seed: S) -> Result<S::Value, Unusable> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Unusable> {
        de::Deserializer::deserialize_seq(self, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unusable> {
        de::Deserializer::deserialize_struct(self, "a record", fields, visitor)
    }
}

struct Elements<'py> {
    items: Bound<'py, pyo3::types::PyIterator>,
    left: usize,
    depth: usize,
}

impl<'de> de::SeqAccess<'de> for Elements<'_> {
    type Error = Unusable;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Unusable> {
        let Some(item) = self.items.next() else { return Ok(None) };
        self.left = self.left.saturating_sub(1);
        seed.deserialize(Object { given: &item?, depth: self.depth }).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

struct Items<'py> {
    items: pyo3::types::dict::BoundDictIterator<'py>,
    value: Option<Bound<'py, PyAny>>,
    depth: usize,
}

impl<'de> de::MapAccess<'de> for Items<'_> {
    type Error = Unusable;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Unusable> {
        let Some((key, value)) = self.items.next() else { return Ok(None) };
        self.value = Some(value);
        // As JSON has them: keys are texts.
        let word = match key.cast::<PyBool>() {
            Ok(key) if key.is_true() => Some("true"),
            Ok(_) => Some("false"),
            Err(_) => key.is_none().then_some("null"),
        };
        let key = key.str()?;
        let key = word.map_or_else(|| text(&key), Ok)?;
        let key: StrDeserializer<'_, Unusable> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Unusable> {
        let value = self.value.take().ok_or_else(|| Unusable("a value without a key".into()))?;
        seed.deserialize(Object { given: &value, depth: self.depth })
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len())
    }
}

/// Converts a record to plain data of Python.
pub(crate) fn to_python<'py, T: Serialize>(py: Python<'py>, record: &T) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(record).map_err(|error| PyValueError::new_err(error.to_string()))?;
    object(py, &value)
}

/// Items after which a handler of Python's gets to run.
pub(crate) const SIGNALS_EVERY: usize = 4096;

/// Makes a list of what may be millions of items; a signal handler that raises ends it.
pub(crate) fn list<'py, T: IntoPyObject<'py>>(
    py: Python<'py>,
    items: impl IntoIterator<Item = T>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for (number, item) in items.into_iter().enumerate() {
        if number % SIGNALS_EVERY == 0 {
            py.check_signals()?;
        }
        list.append(item)?;
    }
    Ok(list)
}

/// The object of Python's for a value.
pub(crate) fn object<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(value) => PyBool::new(py, *value).to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (None, Some(number)) => number.into_pyobject(py)?.into_any(),
            (None, None) => PyFloat::new(py, number.as_f64().unwrap_or(f64::NAN)).into_any(),
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let items: PyResult<Vec<_>> = items.iter().map(|item| object(py, item)).collect();
            PyList::new(py, items?)?.into_any()
        }
        Value::Object(map) => {
            let dict = PyDict::new(py);
            for (key, item) in map {
                dict.set_item(PyString::intern(py, key), object(py, item)?)?;
            }
            dict.into_any()
        }
    })
}
