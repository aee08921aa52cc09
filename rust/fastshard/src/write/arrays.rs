//! Outputs that become blocks of arrays (zarr chunks): tiles are put together to blocks, a writer encodes them.
//!
//! A block is a run of its array's C-ordered elements, so tiles come in the order of blocks, and only
//! those between two tiles in flight are held.

use std::any::Any;
use std::collections::hash_map::{Entry, HashMap};
use std::fmt::Debug;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::codes;
use crate::error::{Finding, Result};
use crate::plan::{Form, Output, Plan};

/// An array to be written.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Array {
    /// Name in the store.
    pub key: String,
    /// Element type.
    pub dtype: crate::tensor::Dtype,
    /// Shape.
    pub shape: Vec<u64>,
    /// Extent of a block.
    pub block: Vec<u64>,
}

/// A buffer that a writer takes a block in.
pub trait BlockBuffer: Debug + Send + Sync + Any {
    /// The block's elements in C order, little-endian. What was there before is of no meaning.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Encodes and stores blocks of arrays.
pub trait ArrayWriter: Debug + Send + Sync {
    /// Makes the store in `folder`, which is there and may hold what an interrupted run left of it.
    ///
    /// # Errors
    /// What keeps it from being made.
    fn begin(&self, folder: &Path, how: &serde_json::Value, arrays: &[Array]) -> Result<()>;

    /// A buffer of `len` bytes for the next block. Called from several threads.
    ///
    /// # Errors
    /// `FS512` if the system has no memory left.
    fn buffer(&self, len: usize) -> Result<Box<dyn BlockBuffer>>;

    /// Stores the block at `index` (counted in blocks), clipped to the array, which lies in a buffer of
    /// [`ArrayWriter::buffer`]. Called from several threads.
    ///
    /// # Errors
    /// What keeps it from being stored.
    fn write(&self, key: &str, index: &[u64], shape: &[u64], block: Box<dyn BlockBuffer>) -> Result<()>;

    /// Completes the store: every block is there.
    ///
    /// # Errors
    /// What keeps it from being complete.
    fn finish(&self) -> Result<()>;

    /// Lets go of the store, which will be removed: nothing is written to it any more afterwards.
    fn abort(&self);
}

/// The blocks of one output.
#[derive(Debug)]
struct Grid {
    key: String,
    shape: Vec<u64>,
    /// The dimension that is divided; those before it have blocks of extent 1, those after it are whole.
    dim: usize,
    /// Its extent in a block.
    rows: u64,
    /// Bytes of one row.
    row: u64,
}

/// A block as a run of bytes of its array.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
    index: Vec<u64>,
    shape: Vec<u64>,
}

impl Grid {
    fn new(output: &Output, block: &[u64]) -> Result<Grid> {
        let shape = &output.shape;
        let wrong = || {
            Finding::new(codes::BAD_VALUE, "extent of a block")
                .tensor(&output.name)
                .expected(format!("a run of the elements of {shape:?}"), format!("{block:?}"))
        };
        if block.len() != shape.len() || block.contains(&0) {
            return Err(wrong().into());
        }
        let dim = (0..shape.len()).rev().find(|&d| block[d] < shape[d]).unwrap_or(0);
        if block[..dim].iter().any(|&n| n != 1) {
            return Err(wrong().into());
        }
        let inner: u64 = shape.iter().skip(dim + 1).product();
        Ok(Grid {
            key: output.key().to_string(),
            shape: shape.to_vec(),
            dim,
            rows: block.get(dim).copied().unwrap_or(1),
            row: inner * output.dtype.size() as u64,
        })
    }

    /// The block that holds byte `at`.
    fn run(&self, at: u64) -> Run {
        let n = self.shape.get(self.dim).copied().unwrap_or(1);
        let (mut outer, row) = (at / (self.row * n), at / self.row % n);
        let first = row / self.rows * self.rows;
        let rows = self.rows.min(n - first);
        let start = (outer * n + first) * self.row;
        let mut index = vec![0; self.shape.len()];
        let mut shape = self.shape.clone();
        if let Some(extent) = shape.get_mut(self.dim) {
            (*extent, index[self.dim]) = (rows, row / self.rows);
        }
        for d in (0..self.dim).rev() {
            (index[d], shape[d]) = (outer % self.shape[d], 1);
            outer /= self.shape[d];
        }
        Run { start, end: start + rows * self.row, index, shape }
    }
}

/// Blocks by output and first byte: what is there of them, and how much.
type Pending = HashMap<(usize, u64), (Box<dyn BlockBuffer>, u64)>;

/// The outputs that become blocks of arrays.
#[derive(Debug)]
pub(super) struct Arrays {
    writer: Arc<dyn ArrayWriter>,
    grids: HashMap<usize, Grid>,
    pending: Mutex<Pending>,
}

impl Arrays {
    /// The arrays of a plan, their stores made below `folder`; none if it has none.
    pub(super) fn begin(
        plan: &Plan,
        folder: &Path,
        writer: Option<&Arc<dyn ArrayWriter>>,
    ) -> Result<Option<Arrays>> {
        let mut stores = plan.files.iter().enumerate().filter_map(|(i, file)| match &file.form {
            Form::Arrays(store) => Some((i as u32, file, store)),
            _ => None,
        });
        let Some((number, file, store)) = stores.next() else { return Ok(None) };
        let refuse = |what: &str| Finding::new(codes::UNSUPPORTED, what).file(&file.name);
        if stores.next().is_some() {
            return Err(refuse("two stores of arrays in one result").into());
        }
        let Some(writer) = writer else {
            return Err(refuse("no writer for arrays was given").into());
        };
        let (mut grids, mut arrays) = (HashMap::new(), Vec::new());
        for (i, output) in plan.outputs.iter().enumerate().filter(|(_, o)| o.file == number) {
            let Some(block) = store.blocks.get(output.key()) else {
                return Err(refuse("no block is stated for an array").tensor(output.key()).into());
            };
            grids.insert(i, Grid::new(output, block)?);
            arrays.push(Array {
                key: output.key().to_string(),
                dtype: output.dtype,
                shape: output.shape.to_vec(),
                block: block.clone(),
            });
        }
        writer.begin(&folder.join(&file.name), &store.how, &arrays)?;
        Ok(Some(Arrays { writer: Arc::clone(writer), grids, pending: Mutex::default() }))
    }

    /// Takes bytes of an output; false if it is no array.
    pub(super) fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<bool> {
        let Some(grid) = self.grids.get(&output) else { return Ok(false) };
        let mut at = offset;
        while at < offset + bytes.len() as u64 {
            let run = grid.run(at);
            let end = run.end.min(offset + bytes.len() as u64);
            let part = &bytes[(at - offset) as usize..(end - offset) as usize];
            let block = if (at, end) == (run.start, run.end) {
                let mut block = self.writer.buffer(part.len())?;
                block.bytes_mut().copy_from_slice(part);
                Some(block)
            } else {
                self.collect(output, &run, at, part)?
            };
            if let Some(block) = block {
                self.writer.write(&grid.key, &run.index, &run.shape, block)?;
            }
            at = end;
        }
        Ok(true)
    }

    /// Adds a part to its block; the block once it is whole.
    fn collect(
        &self,
        output: usize,
        run: &Run,
        at: u64,
        part: &[u8],
    ) -> Result<Option<Box<dyn BlockBuffer>>> {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let (block, filled) = match pending.entry((output, run.start)) {
            Entry::Occupied(block) => block.into_mut(),
            Entry::Vacant(place) => place.insert((self.writer.buffer((run.end - run.start) as usize)?, 0)),
        };
        let start = (at - run.start) as usize;
        block.bytes_mut()[start..start + part.len()].copy_from_slice(part);
        *filled += part.len() as u64;
        let whole = *filled == run.end - run.start;
        Ok(whole.then(|| pending.remove(&(output, run.start)).map(|(block, _)| block)).flatten())
    }

    /// True for an output that becomes an array.
    pub(super) fn holds(&self, output: usize) -> bool {
        self.grids.contains_key(&output)
    }

    /// Lets go of the store.
    pub(super) fn abort(&self) {
        self.writer.abort();
    }

    /// Completes the store.
    pub(super) fn finish(&self) -> Result<()> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((output, start)) = pending.keys().next() {
            return Err(Finding::new(codes::HOLE, format!("the block from byte {start} was never complete"))
                .tensor(&self.grids[output].key)
                .into());
        }
        drop(pending);
        self.writer.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{c_strides, Dtype};

    fn output(shape: &[u64]) -> Output {
        Output {
            name: "w".into(),
            dtype: Dtype::Bf16,
            shape: shape.into(),
            parts: Box::default(),
            fill: crate::plan::Fill::Zero,
            file: 0,
            offset: 0,
            key: None,
        }
    }

    #[test]
    fn runs_of_blocks_tile_an_array() {
        let cases: [(&[u64], &[u64]); 7] = [
            (&[], &[]),
            (&[7], &[3]),
            (&[4, 6], &[2, 6]),
            (&[3, 5, 4], &[1, 2, 4]),
            (&[3, 5, 4], &[1, 1, 3]),
            (&[2, 3], &[2, 3]),
            (&[2, 3], &[5, 9]),
        ];
        for (shape, block) in cases {
            let about = output(shape);
            let grid = Grid::new(&about, block).unwrap();
            let (mut at, strides) = (0, c_strides(shape));
            while at < about.nbytes() {
                let run = grid.run(at);
                assert_eq!(run.start, at, "{shape:?} {block:?}");
                assert_eq!(grid.run(run.end - 1), run);
                let first: u64 = run.index.iter().zip(block).zip(&strides).map(|((i, b), s)| i * b * s).sum();
                assert_eq!(first * 2, run.start);
                assert_eq!(run.shape.iter().product::<u64>() * 2, run.end - run.start);
                at = run.end;
            }
            assert_eq!(at, about.nbytes());
        }
        assert!(Grid::new(&output(&[4, 6]), &[2, 3]).is_err());
        assert!(Grid::new(&output(&[4, 6]), &[0, 6]).is_err());
        assert!(Grid::new(&output(&[4, 6]), &[4]).is_err());
    }
}
