//! What statistics are as JSON: numbers, whole or with a fraction, and lists of bounded length.

use std::cmp::Ordering;

use serde::{de, Deserialize, Deserializer, Serialize, Serializer};

/// The value of an element, without loss: of an integer dtype, or of a floating one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    /// Of a boolean or integer dtype.
    Int(i128),
    /// Of a floating dtype; finite.
    Float(f64),
}

impl Number {
    /// The value, rounded where it is an integer that f64 does not hold.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Int(x) => x as f64,
            Number::Float(x) => x,
        }
    }

    fn order(self, other: Number) -> Ordering {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => a.cmp(&b),
            _ => self.to_f64().partial_cmp(&other.to_f64()).unwrap_or(Ordering::Equal),
        }
    }

    /// True if this is not larger than the other one.
    pub fn le(self, other: Number) -> bool {
        self.order(other) != Ordering::Greater
    }

    /// The smaller one.
    pub fn min(self, other: Number) -> Number {
        if other.order(self) == Ordering::Less {
            other
        } else {
            self
        }
    }

    /// The larger one.
    pub fn max(self, other: Number) -> Number {
        if other.order(self) == Ordering::Greater {
            other
        } else {
            self
        }
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match *self {
            Number::Float(x) => s.serialize_f64(x),
            // Elements have at most 64 bits, signed or not.
            Number::Int(x) => match u64::try_from(x) {
                Ok(x) => s.serialize_u64(x),
                Err(_) => s.serialize_i64(x as i64),
            },
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Number;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a finite number")
            }
            fn visit_u64<E>(self, x: u64) -> Result<Number, E> {
                Ok(Number::Int(x.into()))
            }
            fn visit_i64<E>(self, x: i64) -> Result<Number, E> {
                Ok(Number::Int(x.into()))
            }
            fn visit_f64<E: de::Error>(self, x: f64) -> Result<Number, E> {
                if !x.is_finite() {
                    return Err(E::custom("not a finite number"));
                }
                Ok(Number::Float(x))
            }
        }
        d.deserialize_any(Visitor)
    }
}

/// Reads a list of at most `MOST` items: what a manifest made to mislead holds beyond them is not kept.
pub(super) fn at_most<'de, D, T, const MOST: usize>(d: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Visitor<T, const MOST: usize>(std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MOST: usize> de::Visitor<'de> for Visitor<T, MOST> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a list of at most {MOST}")
        }
        fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(item) = items.next_element()? {
                if list.len() == MOST {
                    return Err(de::Error::invalid_length(MOST + 1, &self));
                }
                list.push(item);
            }
            Ok(list)
        }
    }
    d.deserialize_seq(Visitor::<T, MOST>(std::marker::PhantomData))
}

/// A float by its bits, so that it comes back as it was, infinities and NaN too.
pub(super) mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(x.to_bits())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        u64::deserialize(d).map(f64::from_bits)
    }
}

/// Counts of a fixed number.
pub(super) mod array {
    use serde::{de, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer, const N: usize>(counts: &[u64; N], s: S) -> Result<S::Ok, S::Error> {
        counts.as_slice().serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>, const N: usize>(d: D) -> Result<[u64; N], D::Error> {
        let list: Vec<u64> = super::at_most::<_, _, N>(d)?;
        list.try_into()
            .map_err(|list: Vec<u64>| de::Error::invalid_length(list.len(), &"another number of counts"))
    }
}
