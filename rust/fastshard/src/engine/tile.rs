//! Makes one tile of an output tensor: gathers its parts, combines replicas, applies value ops. It can also
//! list the reads for that.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::boxes::{Spread, SubBox};
use crate::codes;
use crate::error::{Finding, Result};
use crate::kernel::{self, StridedBox};
use crate::memory::{self, PageBuffer};
use crate::plan::{Combine, Fill, Op, Output, Part, Plan, StoredTensor};
use crate::tensor::{c_strides, Dtype};

use super::factors::{for_each_source_box, key_of, Key};
use super::gather::{Into, Sources};
use super::learnt::Drift;
use super::reads::{self, VisitRange, SPAN};

/// Elements per step for a part with several sources or value ops.
const CHUNK: u64 = 64 << 10;

/// Buffers of one worker, reused from tile to tile.
pub struct Workspace {
    /// The tile's bytes.
    pub tile: PageBuffer,
    span: Vec<u8>,
    dense: Vec<u8>,
    other: Vec<u8>,
    twin: Vec<u8>,
    sum: Vec<f32>,
    term: Vec<f32>,
}

impl Workspace {
    /// Maximum bytes of a workspace for tiles of `tile` bytes.
    pub fn bytes(tile: u64) -> u64 {
        tile + PageBuffer::ROOM as u64 + SPAN as u64 + CHUNK * (16 + 16 + 16 + 4 + 4)
    }

    /// A workspace; buffers grow on use.
    ///
    /// # Errors
    /// `FS512` if the system has no memory left.
    pub fn new() -> Result<Self> {
        Ok(Workspace {
            tile: PageBuffer::default(),
            span: memory::allocate(SPAN)?,
            dense: Vec::new(),
            other: Vec::new(),
            twin: Vec::new(),
            sum: Vec::new(),
            term: Vec::new(),
        })
    }

    /// The first `len` bytes of the tile.
    ///
    /// # Errors
    /// `FS512` if the system has no memory left.
    pub fn tile_bytes(&mut self, len: usize) -> Result<&mut [u8]> {
        self.tile.grow(len)?;
        Ok(&mut self.tile[..len])
    }

    /// A buffer for reading data that no view reads.
    pub fn span(&mut self) -> &mut [u8] {
        &mut self.span
    }
}

/// The observations from making a tile.
#[derive(Debug, Default)]
pub struct Seen {
    /// Drift per part that has replicas.
    pub drift: Vec<(usize, Drift)>,
    /// Parts whose values must be zero and are not, with the fact they hang on.
    pub undecided: Vec<(usize, String)>,
    /// Stored tensors and twins that were compared; `source` is unused.
    pub twins: Vec<((u32, u32), Drift)>,
}

/// Whether stored tensors are compared with their twins while they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Twins {
    /// Yes: both are read.
    Compare,
    /// No.
    Leave,
}

/// Fills `work.tile` with bytes `start..end` of an output.
pub fn make(
    plan: &Plan,
    sources: &Sources,
    output: &Output,
    start: u64,
    end: u64,
    twins: Twins,
    work: &mut Workspace,
) -> Result<Seen> {
    let len = (end - start) as usize;
    work.tile_bytes(len)?;
    match output.fill {
        Fill::None => {}
        Fill::Zero => work.tile[..len].fill(0),
        Fill::NegativeZero => fill_negative_zero(output.dtype, &mut work.tile[..len]),
        Fill::Number(number) => fill_number(output.dtype, number, &mut work.tile[..len]),
    }
    let mut seen = Seen::default();
    for_each_piece(plan, output, start, end, twins, &mut |piece| match piece.is_alone {
        true => piece.read_alone(sources, &mut work.tile[..len], &mut work.span),
        false => piece.make(sources, len, twins, work, &mut seen),
    })?;
    Ok(seen)
}

/// Lists the reads of [`make`] from files without a map: the blob, first byte and length of each read, in
/// their order. It leaves out scales that group indices choose, and factors in `factors`, to which it adds
/// the listed ones.
pub fn list_reads(
    plan: &Plan,
    output: &Output,
    start: u64,
    end: u64,
    twins: Twins,
    factors: &mut BTreeSet<Key>,
    visit: VisitRange,
) -> Result<()> {
    for_each_piece(plan, output, start, end, twins, &mut |piece| {
        let (axes, base) = (&piece.part.axes, &piece.part.src_base);
        piece.for_each_read_tensor(twins, &mut |stored| {
            reads::list_box(plan, stored, axes, base, piece.sub, &piece.strides, visit)
        })?;
        let first = piece.part.sources[0];
        for change in &piece.stored(0).changes {
            if factors.insert(key_of(first, change)) {
                for_each_source_box(plan, first, change, &mut |tensor, sub| {
                    reads::list_dense_box(plan, tensor, sub, visit)
                })?;
            }
        }
        Ok(())
    })
}

/// Calls `visit` with the pieces that make up bytes `start..end` of an output, in their order.
fn for_each_piece(
    plan: &Plan,
    output: &Output,
    start: u64,
    end: u64,
    twins: Twins,
    visit: &mut dyn FnMut(&Piece) -> Result<()>,
) -> Result<()> {
    let item = output.dtype.size() as u64;
    let (lo, hi) = (start / item, end / item);
    for (index, part) in output.parts.iter().enumerate() {
        if part.volume() == 0 {
            continue;
        }
        let spread = part.dst();
        let whole = SubBox::whole(&part.extents());
        if spread.first(&whole) >= hi || spread.end(&whole) <= lo {
            continue;
        }
        let first = &plan.stored[part.sources[0] as usize];
        let is_made = first.coded().is_some() && output.dtype.is_float();
        let is_alone = is_alone(part, first, twins) && (first.dtype == output.dtype || is_made);
        let mut found = Vec::new();
        if is_alone {
            spread.cut(&whole, lo, hi, &mut |sub| found.push(sub.clone()));
        } else {
            // Across the source first: what lies together there is read together, also transposed.
            let steps = first.steps(&part.axes);
            spread.cut(&whole, lo, hi, &mut |sub| sub.divide(&steps, CHUNK, &mut found));
        }
        for sub in &found {
            let strides = match is_alone {
                true => Cow::Borrowed(spread.strides()),
                false => Cow::Owned(c_strides(&sub.len).to_vec()),
            };
            let dst = spread.first(sub) - lo;
            visit(&Piece { plan, output, index, part, spread: &spread, sub, dst, is_alone, strides })?;
        }
    }
    Ok(())
}

/// True if the part is one stored tensor whose values do not change, and nothing must be compared.
fn is_alone(part: &Part, first: &StoredTensor, twins: Twins) -> bool {
    part.sources.len() == 1
        && part.ops.is_empty()
        && first.changes.is_empty()
        && (first.twins.is_empty() || twins == Twins::Leave)
        && !matches!(part.combine, Combine::Zero(_))
}

/// A box of a part. If it is made from several tensors, or if its values change, it is small enough for
/// several of them to fit in memory.
struct Piece<'a> {
    plan: &'a Plan,
    output: &'a Output,
    /// Index of the part.
    index: usize,
    part: &'a Part,
    /// Where the part's elements lie in the output.
    spread: &'a Spread,
    sub: &'a SubBox,
    /// The box's first element in the tile.
    dst: u64,
    /// True if it is read straight into the tile.
    is_alone: bool,
    /// Strides of what its sources are read into: the tile, or a buffer that has the box alone, in C order.
    strides: Cow<'a, [u64]>,
}

impl Piece<'_> {
    /// A source of the part.
    fn stored(&self, source: usize) -> &StoredTensor {
        &self.plan.stored[self.part.sources[source] as usize]
    }

    /// Number of its elements.
    fn n(&self) -> usize {
        self.sub.volume() as usize
    }

    /// Type of the sources' elements.
    fn from(&self) -> Dtype {
        self.stored(0).dtype
    }

    /// Twins of its sources: the source, by its place in the part, and the twin.
    fn twins(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        (0..self.part.sources.len()).flat_map(|s| self.stored(s).twins.iter().map(move |twin| (s, *twin)))
    }

    /// Calls `visit` with the tensors from which the box is read, in the order in which [`Self::make`] reads
    /// them.
    fn for_each_read_tensor(
        &self,
        twins: Twins,
        visit: &mut dyn FnMut(&StoredTensor) -> Result<()>,
    ) -> Result<()> {
        visit(self.stored(0))?;
        for (s, twin) in self.twins().filter(|_| twins == Twins::Compare) {
            visit(&self.plan.stored[twin as usize])?;
            if s > 0 {
                visit(self.stored(s))?;
            }
        }
        (1..self.part.sources.len()).try_for_each(|s| visit(self.stored(s)))
    }

    /// Reads the box into the tile.
    fn read_alone(&self, sources: &Sources, tile: &mut [u8], span: &mut [u8]) -> Result<()> {
        let (stored, axes, base, to) =
            (self.stored(0), &self.part.axes, &self.part.src_base, self.output.dtype);
        let mut into = Into { bytes: tile, base: self.dst, strides: &self.strides };
        match stored.coded() {
            Some(coded) => sources.read_coded(stored, coded, axes, base, self.sub, to, &mut into, span),
            None => sources.read(stored, axes, base, self.sub, &mut into, span),
        }
    }

    /// Makes the box and puts it into the tile, which is `len` bytes long.
    fn make(
        &self,
        sources: &Sources,
        len: usize,
        twins: Twins,
        work: &mut Workspace,
        seen: &mut Seen,
    ) -> Result<()> {
        let bytes = self.bytes();
        memory::grow(&mut work.dense, bytes)?;
        memory::grow(&mut work.other, bytes)?;
        self.read(sources, 0, &mut work.dense[..bytes], &mut work.span)?;
        if twins == Twins::Compare {
            self.compare_twins(sources, work, seen)?;
        }
        let in_sum = match self.part.combine {
            _ if self.part.sources.len() == 1 => false,
            Combine::Mean | Combine::Sum => self.add_up(sources, work, seen)?,
            _ => {
                self.compare_copies(sources, work, seen)?;
                false
            }
        };
        let (first, to, n) = (self.stored(0), self.output.dtype, self.n());
        let out = n * to.size();
        if !in_sum && first.changes.is_empty() && self.part.ops.is_empty() {
            self.convert(work)?;
        } else {
            self.change_values(sources, in_sum, work)?;
            memory::grow(&mut work.other, out)?;
            kernel::from_f32(to, &work.sum[..n], &mut work.other[..out]);
        }
        let shape = StridedBox {
            extents: &self.sub.len,
            src_strides: &self.strides,
            dst_strides: self.spread.strides(),
        };
        kernel::copy(&work.other[..out], 0, &mut work.tile[..len], self.dst, &shape, to.size());
        Ok(())
    }

    /// Bytes of the box as its sources have it.
    fn bytes(&self) -> usize {
        self.n() * self.from().size()
    }

    fn read(&self, sources: &Sources, source: usize, buffer: &mut [u8], span: &mut [u8]) -> Result<()> {
        self.read_of(sources, self.stored(source), buffer, span)
    }

    fn read_of(
        &self,
        sources: &Sources,
        stored: &StoredTensor,
        buffer: &mut [u8],
        span: &mut [u8],
    ) -> Result<()> {
        let mut into = Into { bytes: buffer, base: 0, strides: &self.strides };
        sources.read(stored, &self.part.axes, &self.part.src_base, self.sub, &mut into, span)
    }

    /// Compares the sources with their twins.
    fn compare_twins(&self, sources: &Sources, work: &mut Workspace, seen: &mut Seen) -> Result<()> {
        let bytes = self.bytes();
        for (s, other) in self.twins() {
            let twin = &self.plan.stored[other as usize];
            let wide = self.n() * twin.dtype.size();
            memory::grow(&mut work.twin, wide)?;
            self.read_of(sources, twin, &mut work.twin[..wide], &mut work.span)?;
            if s > 0 {
                self.read(sources, s, &mut work.other[..bytes], &mut work.span)?;
            }
            let own = if s == 0 { &work.dense[..bytes] } else { &work.other[..bytes] };
            let drift = twin_drift(self.from(), own, twin.dtype, &work.twin[..wide])?;
            seen.twins.push(((self.part.sources[s], other), drift));
        }
        Ok(())
    }

    /// Adds the sources up in `work.sum`. True if the result is there; false if it is the first source as it is.
    fn add_up(&self, sources: &Sources, work: &mut Workspace, seen: &mut Seen) -> Result<bool> {
        let (n, bytes, from) = (self.n(), self.bytes(), self.from());
        let is_mean = self.part.combine == Combine::Mean;
        memory::grow(&mut work.sum, n)?;
        memory::grow(&mut work.term, n)?;
        let numeric = from.is_float();
        if numeric {
            kernel::to_f32(from, &work.dense[..bytes], &mut work.sum[..n]);
        }
        let mut drift = Drift::default();
        for s in 1..self.part.sources.len() {
            self.read(sources, s, &mut work.other[..bytes], &mut work.span)?;
            if is_mean {
                note_drift(from, &work.dense[..bytes], &work.other[..bytes], s, &mut drift);
            }
            if numeric {
                kernel::to_f32(from, &work.other[..bytes], &mut work.term[..n]);
                work.sum[..n].iter_mut().zip(&work.term[..n]).for_each(|(a, b)| *a += b);
            }
        }
        if !is_mean {
            return Ok(numeric);
        }
        // Equal copies keep their bits: a mean would round them.
        let is_averaged = drift.differing > 0 && numeric;
        if is_averaged {
            let count = self.part.sources.len() as f32;
            work.sum[..n].iter_mut().for_each(|x| *x /= count);
        }
        seen.drift.push((self.index, drift));
        Ok(is_averaged)
    }

    /// Compares the first source with the others, which must be equal, or all zero.
    fn compare_copies(&self, sources: &Sources, work: &mut Workspace, seen: &mut Seen) -> Result<()> {
        let bytes = self.bytes();
        let mut drift = Drift::default();
        for s in 1..self.part.sources.len() {
            self.read(sources, s, &mut work.other[..bytes], &mut work.span)?;
            note_drift(self.from(), &work.dense[..bytes], &work.other[..bytes], s, &mut drift);
            if matches!(self.part.combine, Combine::Zero(_)) && !kernel::is_zero(&work.other[..bytes]) {
                drift.differing += 1;
            }
        }
        if let Combine::Zero(fact) = &self.part.combine {
            if drift.differing > 0 || !kernel::is_zero(&work.dense[..bytes]) {
                seen.undecided.push((self.index, fact.to_string()));
            }
        } else {
            seen.drift.push((self.index, drift));
        }
        Ok(())
    }

    /// Applies changes and value ops in `work.sum`, which holds the values already if `in_sum`.
    fn change_values(&self, sources: &Sources, in_sum: bool, work: &mut Workspace) -> Result<()> {
        let (n, first) = (self.n(), self.stored(0));
        if !in_sum {
            memory::grow(&mut work.sum, n)?;
            kernel::values(self.from(), &work.dense[..self.bytes()], &mut work.sum[..n]);
        }
        for change in &first.changes {
            let factors = sources.factors(self.part.sources[0], change, &mut work.span)?;
            factors.apply(change, first, self.part, self.sub, &mut work.sum[..n], &mut work.term)?;
        }
        for op in &self.part.ops {
            match *op {
                Op::Scale(factor) => work.sum[..n].iter_mut().for_each(|x| *x *= factor),
                Op::Add(term) => work.sum[..n].iter_mut().for_each(|x| *x += term),
            }
        }
        Ok(())
    }

    /// Puts the elements of `work.dense` into `work.other`, in the output's type.
    fn convert(&self, work: &mut Workspace) -> Result<()> {
        let (from, to) = (self.from(), self.output.dtype);
        if from == to {
            std::mem::swap(&mut work.dense, &mut work.other);
            return Ok(());
        }
        let out = self.n() * to.size();
        memory::grow(&mut work.other, out)?;
        let (dense, converted) = (&work.dense[..self.bytes()], &mut work.other[..out]);
        if !from.is_integer() {
            kernel::convert(from, dense, to, converted);
            return Ok(());
        }
        kernel::recount(from, dense, to, converted).map_err(|number| {
            Finding::new(codes::BAD_VALUE, format!("a number that {to} does not hold"))
                .tensor(&self.output.name)
                .expected(format!("the target's counter, {to}"), format!("{number} as {from}"))
                .help("check the counter in the source: it is damaged, or it does not count steps")
                .into()
        })
    }
}

fn note_drift(dtype: Dtype, a: &[u8], b: &[u8], source: usize, drift: &mut Drift) {
    if a == b {
        return;
    }
    let item = dtype.size();
    let mut found = Drift { source, ..Drift::default() };
    for (x, y) in a.chunks_exact(item).zip(b.chunks_exact(item)) {
        if x != y {
            found.differing += 1;
            if dtype.is_float() {
                let (mut p, mut q) = ([0f32], [0f32]);
                kernel::to_f32(dtype, x, &mut p);
                kernel::to_f32(dtype, y, &mut q);
                let difference = (p[0] - q[0]).abs();
                // A NaN on one side is as far apart as can be.
                found.largest =
                    found.largest.max(if difference.is_nan() { f32::INFINITY } else { difference });
            }
        }
    }
    drift.merge(&found);
}

/// The distance of a tensor from its twin: the wider one is rounded to the narrower one's dtype, and compared
/// bit by bit.
fn twin_drift(dtype: Dtype, own: &[u8], twin: Dtype, other: &[u8]) -> Result<Drift> {
    let mut drift = Drift::default();
    let rounded;
    let (narrow, a, b) = if dtype == twin || !dtype.is_float() || !twin.is_float() {
        (dtype, own, other)
    } else {
        let (narrow, wide, bytes, same) =
            if twin.size() > dtype.size() { (dtype, twin, other, own) } else { (twin, dtype, own, other) };
        let mut out = memory::allocate(same.len())?;
        kernel::convert(wide, bytes, narrow, &mut out);
        rounded = out;
        (narrow, same, &rounded[..])
    };
    if a != b {
        note_drift(narrow, a, b, 0, &mut drift);
    }
    Ok(drift)
}

fn fill_negative_zero(dtype: Dtype, bytes: &mut [u8]) {
    let item = dtype.size();
    bytes.fill(0);
    if dtype.is_float() {
        // Little-endian: the sign is the top bit of the last byte.
        bytes.iter_mut().skip(item - 1).step_by(item).for_each(|b| *b = 0x80);
    }
}

/// Elements that are all the same number.
fn fill_number(dtype: Dtype, number: u32, bytes: &mut [u8]) {
    let element = dtype.element(number).expect("it was checked when it was placed");
    bytes.chunks_exact_mut(element.len()).for_each(|each| each.copy_from_slice(&element));
}

/// Reads a region that should be zero; returns a warning if it is not.
pub fn check_pad(
    plan: &Plan,
    sources: &Sources,
    pad: &crate::plan::PadRegion,
    work: &mut Workspace,
) -> Result<Option<Finding>> {
    let stored = &plan.stored[pad.stored as usize];
    let extents: Vec<u64> = pad.axes.iter().map(|a| a.n).collect();
    let strides = c_strides(&extents);
    let spread = crate::boxes::Spread::new(0, strides.to_vec());
    let whole = SubBox::whole(&extents);
    let (mut at, total) = (0, whole.volume());
    while at < total {
        let next = (at + CHUNK).min(total);
        let mut found = Vec::new();
        spread.cut(&whole, at, next, &mut |sub| found.push(sub.clone()));
        for sub in found {
            let bytes = (sub.volume() as usize) * stored.dtype.size();
            memory::grow(&mut work.dense, bytes)?;
            let strides = c_strides(&sub.len);
            let mut into = Into { bytes: &mut work.dense[..bytes], base: 0, strides: &strides };
            sources.read(stored, &pad.axes, &pad.src_base, &sub, &mut into, &mut work.span)?;
            let zero = if stored.dtype.is_float() {
                let item = stored.dtype.size();
                work.dense[..bytes]
                    .chunks_exact(item)
                    .all(|x| x[..item - 1].iter().all(|b| *b == 0) && x[item - 1] & 0x7f == 0)
            } else {
                kernel::is_zero(&work.dense[..bytes])
            };
            if !zero {
                let mut finding = Finding::new(codes::PAD_NOT_ZERO, "rows beyond the vocabulary hold values")
                    .tensor(&stored.name)
                    .expected("zeros", "other values")
                    .help("check the vocabulary size: these rows are dropped; if they are tokens, pass the true one")
                    .run("--vocab-size N");
                finding.rank = stored.rank.as_deref().map(str::to_string);
                return Ok(Some(finding));
            }
        }
        at = next;
    }
    Ok(None)
}
