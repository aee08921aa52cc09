//! fastshard: proves sharded checkpoints whole and streams them into the layout the next tool needs.
//!
//! See ARCHITECTURE.md in the repository for the ideas and the order of the modules.

pub mod codes;
pub mod error;
pub mod format;
pub mod layout;
pub mod storage;
pub mod tensor;
pub mod value;
