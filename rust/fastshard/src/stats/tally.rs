//! Counting and summing the numbers of a run of bytes.

use serde::{Deserialize, Serialize};

use super::{bin, number, Number, BINS, BLOCK};
use crate::kernel::{self, FloatBlock};
use crate::tensor::Dtype;

/// Mean and sum of squared deviations of some numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Moments {
    pub n: u64,
    #[serde(with = "number::bits")]
    pub mean: f64,
    #[serde(with = "number::bits")]
    pub squares: f64,
}

impl Moments {
    /// Those of `n` numbers, from the sums of their differences to `around` and of their squares.
    fn around(around: f64, n: u64, sum: f64, squares: f64) -> Moments {
        let count = n.max(1) as f64;
        Moments { n, mean: around + sum / count, squares: (squares - sum * sum / count).max(0.0) }
    }

    /// Joins those of other numbers (Chan, Golub and LeVeque 1979, formula 2.1).
    pub fn join(&mut self, other: &Moments) {
        if self.n == 0 || other.n == 0 {
            if self.n == 0 {
                *self = *other;
            }
            return;
        }
        let (own, more) = (self.n as f64, other.n as f64);
        let apart = other.mean - self.mean;
        self.n += other.n;
        let all = self.n as f64;
        self.mean += apart * (more / all);
        self.squares += other.squares + apart * apart * (own * more / all);
    }
}

/// What was seen in some numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub zeros: u64,
    pub nan: u64,
    pub inf: u64,
    pub min: Option<Number>,
    pub max: Option<Number>,
    pub moments: Moments,
    #[serde(with = "number::array")]
    pub histogram: [u64; BINS],
}

impl Default for Tally {
    fn default() -> Self {
        let moments = Moments::default();
        Tally { zeros: 0, nan: 0, inf: 0, min: None, max: None, moments, histogram: [0; BINS] }
    }
}

/// Applies `$body` with `$value` bound to a function from an element's bytes to `i128`, for a wide integer dtype.
macro_rules! integers {
    ($dtype:expr, $bytes:expr, $tally:expr, $($name:ident $int:ty),*) => {
        match $dtype {
            $(Dtype::$name => $bytes.chunks(BLOCK * size_of::<$int>()).for_each(|block| {
                let values = block.chunks_exact(size_of::<$int>())
                    .map(|x| <$int>::from_le_bytes(x.try_into().expect("whole element")));
                let (min, max) = values.clone().fold((<$int>::MAX, <$int>::MIN), |(min, max), x| (min.min(x), max.max(x)));
                $tally.extremes(Number::Int(min.into()), Number::Int(max.into()));
                let mut wide = [0f64; BLOCK];
                values.zip(&mut wide).for_each(|(x, wide)| *wide = x as f64);
                $tally.block(&wide[..block.len() / size_of::<$int>()], false);
            }),)*
            other => unreachable!("{other} is no wide integer"),
        }
    };
}

impl Tally {
    /// Tallies a run of whole elements.
    pub fn of(dtype: Dtype, bytes: &[u8]) -> Tally {
        let mut tally = Tally::default();
        match dtype {
            Dtype::Bool | Dtype::U8 | Dtype::I8 => tally.small(dtype, bytes),
            _ if dtype.is_f8() => tally.small(dtype, bytes),
            Dtype::F32 | Dtype::C64 => tally.floats(Dtype::F32, bytes),
            Dtype::F16 | Dtype::Bf16 => tally.floats(dtype, bytes),
            Dtype::F64 | Dtype::C128 => bytes.chunks(BLOCK * 8).for_each(|block| {
                let mut wide = [0f64; BLOCK];
                let values = block.chunks_exact(8);
                values
                    .zip(&mut wide)
                    .for_each(|(x, wide)| *wide = f64::from_le_bytes(x.try_into().expect("eight bytes")));
                tally.block(&wide[..block.len() / 8], true);
            }),
            _ => {
                integers!(dtype, bytes, tally, U16 u16, I16 i16, U32 u32, I32 i32, U64 u64, I64 i64);
            }
        }
        tally
    }

    /// Adds everything but the moments of another tally.
    pub fn add_counts(&mut self, other: &Tally) {
        self.zeros += other.zeros;
        self.nan += other.nan;
        self.inf += other.inf;
        if let (Some(min), Some(max)) = (other.min, other.max) {
            self.extremes(min, max);
        }
        self.histogram.iter_mut().zip(&other.histogram).for_each(|(a, b)| *a += b);
    }

    fn extremes(&mut self, min: Number, max: Number) {
        self.min = Some(self.min.map_or(min, |have| have.min(min)));
        self.max = Some(self.max.map_or(max, |have| have.max(max)));
    }

    /// 8-bit dtypes: how often each byte stands there says all.
    fn small(&mut self, dtype: Dtype, bytes: &[u8]) {
        let counts = kernel::count_bytes(bytes);
        let value = |byte: u8| match dtype {
            Dtype::Bool => f64::from(u8::from(byte != 0)),
            Dtype::U8 => f64::from(byte),
            Dtype::I8 => f64::from(byte as i8),
            _ => f64::from(kernel::f8_value(dtype, byte)),
        };
        let mut moments = Moments::default();
        for (byte, &n) in (0u8..=255).zip(&counts).filter(|(_, n)| **n > 0) {
            let x = value(byte);
            if !self.apart(x, n) {
                continue;
            }
            let number = if dtype.is_f8() { Number::Float(x + 0.0) } else { Number::Int(x as i128) };
            self.extremes(number, number);
            moments.join(&Moments { n, mean: x, squares: 0.0 });
        }
        self.moments.join(&moments);
    }

    /// Counts `n` numbers of value `x`; false if it is not finite.
    fn apart(&mut self, x: f64, n: u64) -> bool {
        if x.is_nan() {
            self.nan += n;
        } else if x.is_infinite() {
            self.inf += n;
        } else if x == 0.0 {
            self.zeros += n;
        } else {
            self.histogram[bin(x < 0.0, exponent(x))] += n;
        }
        x.is_finite()
    }

    /// F16, BF16 and F32, all of whose numbers are in F32.
    fn floats(&mut self, dtype: Dtype, bytes: &[u8]) {
        let mut buffer = [0f32; BLOCK];
        // By the nine bits of sign and exponent.
        let mut counts = [0u64; 512];
        for block in bytes.chunks(BLOCK * dtype.size()) {
            let values = &mut buffer[..block.len() / dtype.size()];
            kernel::to_f32(dtype, block, values);
            let found = kernel::float_block(values, &mut counts);
            self.found(&found, values.len());
            // Zeros share their exponent with the numbers that have no leading bit.
            counts[0] -= found.zeros[0];
            counts[256] -= found.zeros[1];
            if found.non_finite > 0 {
                let nan = values.iter().filter(|x| x.is_nan()).count() as u64;
                self.nan += nan;
                self.inf += found.non_finite - nan;
            }
        }
        for (key, n) in counts.iter().enumerate().filter(|(key, _)| key & 0xff != 0xff) {
            self.histogram[bin(key >= 256, (key & 0xff) as i32 - 127)] += n;
        }
    }

    fn found(&mut self, found: &FloatBlock, len: usize) {
        self.zeros += found.zeros.iter().sum::<u64>();
        let n = len as u64 - found.non_finite;
        if n > 0 {
            self.moments.join(&Moments::around(found.around, n, found.sum, found.squares));
            // Adding zero takes its sign from a zero.
            self.extremes(Number::Float(found.min + 0.0), Number::Float(found.max + 0.0));
        }
    }

    /// Numbers in F64; `float` if their extremes are to be kept too.
    fn block(&mut self, values: &[f64], float: bool) {
        let Some(&around) = values.iter().find(|x| x.is_finite()) else {
            values.iter().for_each(|&x| {
                self.apart(x, 1);
            });
            return;
        };
        let (mut min, mut max) = (around, around);
        let (mut sums, mut squares, mut n) = ([0f64; 8], [0f64; 8], 0);
        for (i, &x) in values.iter().enumerate() {
            if self.apart(x, 1) {
                n += 1;
                (min, max) = (min.min(x), max.max(x));
                let apart = x - around;
                sums[i % 8] += apart;
                squares[i % 8] += apart * apart;
            }
        }
        self.moments.join(&Moments::around(around, n, sums.iter().sum(), squares.iter().sum()));
        if float {
            self.extremes(Number::Float(min + 0.0), Number::Float(max + 0.0));
        }
    }
}

/// The exponent of a finite number that is not zero; of ones without a leading bit the smallest.
#[inline(always)]
fn exponent(x: f64) -> i32 {
    ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023
}
