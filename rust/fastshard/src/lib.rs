//! fastshard: proves sharded checkpoints whole and streams them into the layout the next tool needs.
//!
//! See ARCHITECTURE.md in the repository for the ideas and the order of the modules.

pub mod boxes;
mod buffered;
pub mod catalog;
pub mod codes;
pub mod compose;
pub mod distributed;
pub mod draft;
pub mod engine;
pub mod error;
mod excerpt;
pub mod few;
pub mod files;
pub mod format;
pub mod gate;
pub mod hash;
pub mod kernel;
pub mod layout;
pub mod manifest;
pub mod memory;
pub mod name;
pub mod odd_dtypes;
pub mod pattern;
pub mod plan;
pub mod publish;
pub mod repair;
pub mod request;
pub mod roster;
pub(crate) mod standing;
pub mod stats;
pub mod steps;
pub mod storage;
pub mod tensor;
pub mod topics;
pub mod unwritten;
pub mod value;
pub mod verify;
pub mod words;
pub mod write;
pub mod writer;
