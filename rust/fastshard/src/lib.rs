//! fastshard: proves sharded checkpoints whole and streams them into the layout the next tool needs.
//!
//! See ARCHITECTURE.md in the repository for the ideas and the order of the modules.

pub mod boxes;
pub mod codes;
pub mod compose;
pub mod error;
pub mod format;
pub mod layout;
pub mod plan;
pub mod storage;
pub mod tensor;
pub mod value;
