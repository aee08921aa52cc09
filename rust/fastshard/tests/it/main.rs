//! Tests of the core by what it offers, in one program: each of its own would be linked anew.
//!
//! They run as threads of one process. What must be alone in one runs this program again, for one test of it.

mod common;
mod content;
mod engine;
mod kernel;
mod memory;
mod oracle;
mod pieces;
mod read_again;
mod shared;
mod sources;
mod stats;
mod torch_attacks;
mod torch_files;
mod torch_output;
