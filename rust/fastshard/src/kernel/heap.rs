//! The allocator's own.

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
