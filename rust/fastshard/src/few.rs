//! Lists of a few numbers, of which millions of tensors have some.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A list whose length does not change. It stores one or two values itself; a vector would allocate for them.
#[derive(Clone)]
pub struct Few<T>(Values<T>);

#[derive(Clone)]
enum Values<T> {
    One([T; 1]),
    Two([T; 2]),
    /// None, or more than two.
    Many(Box<[T]>),
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Values::One(values) => values,
            Values::Two(values) => values,
            Values::Many(values) => values,
        }
    }
}

impl<T> DerefMut for Few<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            Values::One(values) => values,
            Values::Two(values) => values,
            Values::Many(values) => values,
        }
    }
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Few(Values::Many(Box::default()))
    }
}

impl<T: Copy> From<&[T]> for Few<T> {
    fn from(values: &[T]) -> Self {
        Few(match *values {
            [one] => Values::One([one]),
            [one, two] => Values::Two([one, two]),
            _ => Values::Many(values.into()),
        })
    }
}

impl<T: Copy> From<Vec<T>> for Few<T> {
    fn from(values: Vec<T>) -> Self {
        match values.len() {
            1 | 2 => Few::from(&values[..]),
            _ => Few(Values::Many(values.into())),
        }
    }
}

impl<T: Copy, const N: usize> From<[T; N]> for Few<T> {
    fn from(values: [T; N]) -> Self {
        Few::from(&values[..])
    }
}

impl<T: Copy> Few<T> {
    /// The same value `len` times.
    pub fn repeat(value: T, len: usize) -> Self {
        Few(match len {
            1 => Values::One([value]),
            2 => Values::Two([value; 2]),
            _ => Values::Many(vec![value; len].into()),
        })
    }

    /// Adds a value at the end, for lists that rarely get one.
    pub fn push(&mut self, value: T) {
        *self = self.iter().copied().chain([value]).collect();
    }
}

impl<T: Copy> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut values = values.into_iter();
        let Some(one) = values.next() else { return Few::default() };
        let Some(two) = values.next() else { return Few(Values::One([one])) };
        let Some(three) = values.next() else { return Few(Values::Two([one, two])) };
        Few(Values::Many([one, two, three].into_iter().chain(values).collect()))
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut Few<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

impl<T: fmt::Debug> fmt::Debug for Few<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Few<T>) -> bool {
        self[..] == other[..]
    }
}

impl<T: PartialEq> PartialEq<Vec<T>> for Few<T> {
    fn eq(&self, other: &Vec<T>) -> bool {
        self[..] == other[..]
    }
}

impl<T: PartialEq> PartialEq<[T]> for Few<T> {
    fn eq(&self, other: &[T]) -> bool {
        self[..] == *other
    }
}

impl<T: PartialEq, const N: usize> PartialEq<[T; N]> for Few<T> {
    fn eq(&self, other: &[T; N]) -> bool {
        self[..] == other[..]
    }
}

impl<T: PartialEq> PartialEq<Few<T>> for Vec<T> {
    fn eq(&self, other: &Few<T>) -> bool {
        self[..] == other[..]
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T: Hash> Hash for Few<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self[..].hash(state);
    }
}

impl<T: Serialize> Serialize for Few<T> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self[..].serialize(to)
    }
}

impl<'de, T: Copy + Deserialize<'de>> Deserialize<'de> for Few<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        Vec::<T>::deserialize(from).map(Few::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_those_they_were_made_of() {
        for len in 0..5u64 {
            let values: Vec<u64> = (1..=len).collect();
            let lists = [Few::from(&values[..]), Few::from(values.clone()), values.iter().copied().collect()];
            for mut few in lists {
                assert_eq!(few, values);
                few.push(9);
                assert_eq!(few[..], [&values[..], &[9]].concat());
            }
            assert_eq!(Few::repeat(7, len as usize), vec![7; len as usize]);
        }
        assert_eq!(size_of::<Few<u64>>(), size_of::<Vec<u64>>());
    }
}
