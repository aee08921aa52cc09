//! The allocator's own.

use std::alloc::{alloc_zeroed, Layout};

/// Allocates `len` zero bytes, of which the system takes a page when it is touched; none where the system has no memory left.
#[allow(unsafe_code)]
pub fn allocate_zeros(len: usize) -> Option<Vec<u8>> {
    if len == 0 {
        return Some(Vec::new());
    }
    let layout = Layout::array::<u8>(len).ok()?;
    // SAFETY: the layout has a size.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return None;
    }
    // SAFETY: the global allocator gave it with the layout of `len` bytes, and all of them are zero.
    Some(unsafe { Vec::from_raw_parts(memory, len, len) })
}

/// Gives back to the system what was freed: after planning that can be several times what is in use, and a
/// budget counts it.
#[allow(unsafe_code)]
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, and leaves alone what is allocated.
    unsafe {
        libc::malloc_trim(0);
    }
}
