//! Names of tensors, kept once for all records that need them.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

/// A name that several records share: a file's tensor, the stored tensor of a plan, its rule and its output.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Name(#[serde(serialize_with = "as_text")] Arc<str>);

fn as_text<S: serde::Serializer>(name: &Arc<str>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(name)
}

impl Name {
    /// The name.
    pub fn as_str(&self) -> &str {
        self
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        self
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self
    }
}

impl Default for Name {
    fn default() -> Self {
        Name::from("")
    }
}

impl From<&str> for Name {
    fn from(name: &str) -> Self {
        Name(name.into())
    }
}

impl From<String> for Name {
    fn from(name: String) -> Self {
        Name(name.into())
    }
}

impl From<&String> for Name {
    fn from(name: &String) -> Self {
        Name(name.as_str().into())
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.to_string()
    }
}

impl From<&Name> for String {
    fn from(name: &Name) -> Self {
        name.to_string()
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        **self == *other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        **self == **other
    }
}

impl PartialEq<String> for Name {
    fn eq(&self, other: &String) -> bool {
        **self == **other
    }
}

impl PartialEq<Name> for String {
    fn eq(&self, other: &Name) -> bool {
        **self == **other
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(Name::from)
    }
}

/// Keys that lead to a tensor in its file: mostly one, which is stored in the list itself.
#[derive(Clone, PartialEq, Eq)]
pub enum Keys {
    /// One.
    One([Name; 1]),
    /// Any number.
    Many(Box<[Name]>),
}

impl Deref for Keys {
    type Target = [Name];

    fn deref(&self) -> &[Name] {
        match self {
            Keys::One(keys) => keys,
            Keys::Many(keys) => keys,
        }
    }
}

impl<'a> IntoIterator for &'a Keys {
    type Item = &'a Name;
    type IntoIter = std::slice::Iter<'a, Name>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: Into<Name>> FromIterator<T> for Keys {
    fn from_iter<I: IntoIterator<Item = T>>(keys: I) -> Self {
        let mut keys: Vec<Name> = keys.into_iter().map(Into::into).collect();
        match keys.len() {
            1 => Keys::One([keys.remove(0)]),
            _ => Keys::Many(keys.into()),
        }
    }
}

impl From<Vec<String>> for Keys {
    fn from(keys: Vec<String>) -> Self {
        keys.into_iter().collect()
    }
}

impl Keys {
    /// The keys, joined by dots.
    pub fn joined(&self) -> Name {
        join(self)
    }

    /// The keys below `outer`, if they begin with it.
    pub fn below(&self, outer: &[String]) -> Option<&[Name]> {
        let (start, rest) = self.split_at_checked(outer.len())?;
        (start == outer).then_some(rest)
    }
}

/// Joins keys by dots; a single key stays as it is.
pub fn join(keys: &[Name]) -> Name {
    match keys {
        [one] => one.clone(),
        _ => keys.join(".").into(),
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

impl Serialize for Keys {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self[..].serialize(to)
    }
}
