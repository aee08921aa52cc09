//! Blocked transposes: the box copies where source and destination run along different axes.
//!
//! A tile is one cache line of columns by [`RUN`] bytes of rows. It is gathered into a small buffer on the
//! stack, so that each source line is read once and each destination row gets its whole run at once: rows a
//! power of two apart share a cache set, and writing them piecemeal evicts every line half filled.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes of a tile along the destination's dense axis. Longer and shorter runs measured slower.
const RUN: usize = 2 * LINE;

/// Columns that are walked together. Each is a destination row in a page of its own, and the pages of a strip
/// have to stay in the second-level TLB from one tile to the next.
const STRIP: usize = 1024;

/// Boxes from this many bytes on are stored past the cache, which they would flush: that saves reading the
/// destination, at the price of fetching it again should it be used soon.
const STREAM_BYTES: usize = 8 << 20;

/// One axis of a box that is known to lie inside both slices; strides in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    pub(super) len: usize,
    pub(super) src: usize,
    pub(super) dst: usize,
}

/// An element that moves as one word; neither side needs to be aligned.
pub(super) trait Item: Copy {
    /// Edge of the square that [`Item::square`] transposes, in elements; divides `LINE / size`.
    const EDGE: usize;

    /// Transposes a square whose rows are `src_row` bytes apart into one whose rows are `dst_row` apart.
    ///
    /// # Safety
    /// The square is readable at `src` and writable at `dst`, and the two do not overlap.
    #[allow(unsafe_code)]
    unsafe fn square(src: *const u8, src_row: usize, dst: *mut u8, dst_row: usize);
}

/// The buffer of a tile: one run for each column, of which one-byte items have the most.
#[repr(align(64))]
struct Tile(std::mem::MaybeUninit<[u8; LINE * RUN]>);

/// Copies a two-axis box; `rows` is the densest axis of the destination, `cols` of the source.
///
/// # Safety
/// Every element of the box is readable from `src` and writable at `dst`, and the two do not overlap.
#[allow(unsafe_code)]
pub(super) unsafe fn transpose<T: Item>(rows: Axis, cols: Axis, src: *const u8, dst: *mut u8) {
    let item = size_of::<T>();
    // A box too narrow for a square gains nothing from the buffer.
    let tiled = rows.dst == item && cols.src == item && rows.len.min(cols.len) >= T::EDGE;
    // Where all rows start at the same offset in a line, what comes before the first whole line is a tile of
    // its own: then no tile shares a source line with another one, and whole destination lines can stream.
    let large = rows.len.saturating_mul(cols.len).saturating_mul(item) >= STREAM_BYTES;
    let stream = tiled && large && cols.dst.is_multiple_of(LINE) && (dst as usize).is_multiple_of(item);
    let r_head = if stream { (dst as usize).wrapping_neg() % LINE / item } else { 0 };
    let c_head = if rows.src.is_multiple_of(LINE) { (src as usize).wrapping_neg() % LINE / item } else { 0 };
    let mut tile = Tile(std::mem::MaybeUninit::uninit());
    let mut strip = 0;
    while strip < cols.len {
        let strip_end = cols.len.min(if strip == 0 { c_head + STRIP } else { strip + STRIP });
        let mut r = 0;
        while r < rows.len {
            let r_len = if r < r_head { r_head } else { RUN / item }.min(rows.len - r);
            let mut c = strip;
            while c < strip_end {
                let c_len = if c < c_head { c_head } else { LINE / item }.min(strip_end - c);
                let (rows, cols) = (Axis { len: r_len, ..rows }, Axis { len: c_len, ..cols });
                // SAFETY: the tile is a part of the box.
                unsafe {
                    let (s, d) = (src.add(r * rows.src + c * cols.src), dst.add(r * rows.dst + c * cols.dst));
                    if tiled {
                        gather::<T>(rows, cols, s, &mut tile);
                        scatter(r_len * item, cols, &tile, d, stream && r >= r_head);
                    } else {
                        scalar::<T>(rows, cols, s, d);
                    }
                }
                c += c_len;
            }
            r += r_len;
        }
        strip = strip_end;
    }
    if stream {
        arch::stream_done();
    }
}

/// Transposes a tile into the buffer.
///
/// # Safety
/// The tile is readable at `src`, dense along `cols`, and no larger than the buffer.
#[allow(unsafe_code)]
#[inline]
unsafe fn gather<T: Item>(rows: Axis, cols: Axis, src: *const u8, tile: &mut Tile) {
    let item = size_of::<T>();
    let buffer = tile.0.as_mut_ptr().cast::<u8>();
    let (r_whole, c_whole) = (rows.len - rows.len % T::EDGE, cols.len - cols.len % T::EDGE);
    // SAFETY: every part lies inside the tile, and element (r, c) goes to r * item in run c of the buffer.
    unsafe {
        for r in (0..r_whole).step_by(T::EDGE) {
            for i in r..r + T::EDGE {
                // The next tile's part of the row: too many streams at once for the CPU to foresee.
                arch::prefetch(src.wrapping_add(i * rows.src + LINE));
            }
            for c in (0..c_whole).step_by(T::EDGE) {
                T::square(src.add(r * rows.src + c * item), rows.src, buffer.add(c * RUN + r * item), RUN);
            }
        }
        let part = |r: usize, r_len: usize, c: usize, c_len: usize| {
            let rows = Axis { len: r_len, src: rows.src, dst: item };
            let cols = Axis { len: c_len, src: item, dst: RUN };
            scalar::<T>(rows, cols, src.add(r * rows.src + c * item), buffer.add(c * RUN + r * item));
        };
        part(r_whole, rows.len - r_whole, 0, cols.len);
        part(0, r_whole, c_whole, cols.len - c_whole);
    }
}

/// Writes the first `bytes` of each run of the buffer to its destination row.
///
/// # Safety
/// The buffer holds that much of every run, and the rows are writable; to stream, each starts on a line.
#[allow(unsafe_code)]
#[inline]
unsafe fn scatter(bytes: usize, cols: Axis, tile: &Tile, dst: *mut u8, stream: bool) {
    let streamed = if stream { bytes - bytes % LINE } else { 0 };
    for c in 0..cols.len {
        // SAFETY: run `c` of the buffer and row `c` of the destination.
        unsafe {
            let (run, row) = (tile.0.as_ptr().cast::<u8>().add(c * RUN), dst.add(c * cols.dst));
            for at in (0..streamed).step_by(LINE) {
                arch::stream_line(run.add(at), row.add(at));
            }
            if bytes == RUN && !stream {
                run.copy_to_nonoverlapping(row, RUN);
            } else if streamed < bytes {
                run.add(streamed).copy_to_nonoverlapping(row.add(streamed), bytes - streamed);
            }
        }
    }
}

/// Copies a two-axis box element by element.
///
/// # Safety
/// As [`transpose`].
#[allow(unsafe_code)]
#[inline]
unsafe fn scalar<T: Copy>(rows: Axis, cols: Axis, src: *const u8, dst: *mut u8) {
    for c in 0..cols.len {
        for r in 0..rows.len {
            // SAFETY: (r, c) is an element of the box.
            unsafe {
                let value = src.add(r * rows.src + c * cols.src).cast::<T>().read_unaligned();
                dst.add(r * rows.dst + c * cols.dst).cast::<T>().write_unaligned(value);
            }
        }
    }
}

/// SSE2, which every x86-64 has: in registers a tile already moves faster than memory delivers it.
#[cfg(target_arch = "x86_64")]
mod arch {
    use core::arch::x86_64::{
        __m128i, _mm_load_si128, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_storeu_si128,
        _mm_stream_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpackhi_epi8,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64, _mm_unpacklo_epi8, _MM_HINT_T0,
    };

    use super::{Item, LINE};

    /// Asks for the line at `at`, which may be any address.
    #[allow(unsafe_code)]
    #[inline]
    pub(super) fn prefetch(at: *const u8) {
        // SAFETY: a hint that never faults; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    /// Stores one line past the cache.
    ///
    /// # Safety
    /// A line is readable at `src` and writable at `dst`, and both are aligned to it.
    #[allow(unsafe_code)]
    #[inline]
    pub(super) unsafe fn stream_line(src: *const u8, dst: *mut u8) {
        for at in (0..LINE).step_by(16) {
            // SAFETY: `at` is within the line and keeps its alignment.
            unsafe { _mm_stream_si128(dst.add(at).cast(), _mm_load_si128(src.add(at).cast())) }
        }
    }

    /// Orders streamed lines before whatever tells another thread that they are there.
    #[allow(unsafe_code)]
    pub(super) fn stream_done() {
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() }
    }

    macro_rules! item {
        ($item:ty, $edge:literal, $lo:ident, $hi:ident) => {
            impl Item for $item {
                const EDGE: usize = $edge;

                #[allow(unsafe_code)]
                #[inline]
                unsafe fn square(src: *const u8, src_row: usize, dst: *mut u8, dst_row: usize) {
                    // SAFETY: a row of the square is one register; SSE2 is part of x86-64.
                    unsafe {
                        let mut x: [__m128i; $edge] =
                            std::array::from_fn(|i| _mm_loadu_si128(src.add(i * src_row).cast()));
                        // Interleaving each row with the one half the square below, as often as halving
                        // the edge takes to reach 1, is a transpose.
                        for _ in 0..($edge as u32).ilog2() {
                            let y = x;
                            for i in 0..$edge / 2 {
                                x[2 * i] = $lo(y[i], y[i + $edge / 2]);
                                x[2 * i + 1] = $hi(y[i], y[i + $edge / 2]);
                            }
                        }
                        for (i, row) in x.into_iter().enumerate() {
                            _mm_storeu_si128(dst.add(i * dst_row).cast(), row);
                        }
                    }
                }
            }
        };
    }
    item!(u8, 16, _mm_unpacklo_epi8, _mm_unpackhi_epi8);
    item!(u16, 8, _mm_unpacklo_epi16, _mm_unpackhi_epi16);
    item!(u32, 4, _mm_unpacklo_epi32, _mm_unpackhi_epi32);
    item!(u64, 2, _mm_unpacklo_epi64, _mm_unpackhi_epi64);

    impl Item for u128 {
        const EDGE: usize = 1;

        #[allow(unsafe_code)]
        #[inline]
        unsafe fn square(src: *const u8, _src_row: usize, dst: *mut u8, _dst_row: usize) {
            // SAFETY: the square is one element.
            unsafe { _mm_storeu_si128(dst.cast(), _mm_loadu_si128(src.cast())) }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use super::{Item, LINE};

    /// No hint.
    pub(super) fn prefetch(_at: *const u8) {}

    /// A plain copy of one line.
    ///
    /// # Safety
    /// A line is readable at `src` and writable at `dst`, and the two do not overlap.
    #[allow(unsafe_code)]
    #[inline]
    pub(super) unsafe fn stream_line(src: *const u8, dst: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { src.copy_to_nonoverlapping(dst, LINE) }
    }

    /// Plain stores need no ordering of their own.
    pub(super) fn stream_done() {}

    macro_rules! item {
        ($($item:ty)*) => {$(
            impl Item for $item {
                const EDGE: usize = 1;

                #[allow(unsafe_code)]
                #[inline]
                unsafe fn square(src: *const u8, _src_row: usize, dst: *mut u8, _dst_row: usize) {
                    // SAFETY: the square is one element.
                    unsafe { dst.cast::<$item>().write_unaligned(src.cast::<$item>().read_unaligned()) }
                }
            }
        )*};
    }
    item!(u8 u16 u32 u64 u128);
}
