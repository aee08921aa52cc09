//! What several processes do together, on one host or on many. There are two ideas.
//!
//! **Parts** are written apart and committed together. A *run* is one result that several processes write. Each part of
//! it can be made by any process at any time: nobody waits for anybody, and one process commits the run once all parts
//! are there.
//!
//! | module        | what it holds                                                                                    |
//! |---------------|--------------------------------------------------------------------------------------------------|
//! | [`parts`]     | begins a run, makes a part of it, commits it: what `make-part` and `commit` call                  |
//! | [`rounds`]    | the protocol in the staging folder: who may write, and who takes over from whom                  |
//! | [`member`]    | a process that writes: its journal, and its signs of life                                        |
//! | [`share`]     | which tiles each part consists of                                                                |
//! | `pages`       | which pages of a file two parts touch: these go into the journals                                |
//! | `part_sink`   | where the tiles of a part go                                                                     |
//!
//! **A meeting** brings ranks together that were started at the same time. Each rank knows its number; rank 0 begins a run,
//! every rank makes one part, and rank 0 commits it. Nobody goes on alone.
//!
//! | module        | what it holds                                                                                    |
//! |---------------|--------------------------------------------------------------------------------------------------|
//! | [`meeting`]   | how ranks find each other and notice that one is gone, through the destination's directory       |
//! | [`ranks`]     | the run of a meeting: parts, as above, made by its ranks                                         |
//! | [`lending`]   | a meeting whose ranks have different sources on their own disks: each lends to the others        |
//! | `foresee`     | asks for what a part will read of other hosts' files, before it reads them                       |
//!
//! Two things stay with the engine, since one process needs them as well: the evidence that a process learns beside its tiles
//! (`engine/evidence`), and the judgement of all evidence when the run is committed. The clock by which processes wait, and
//! the record of which process is which, belong to [`crate::publish`].

pub(crate) mod foresee;
pub mod lending;
pub mod meeting;
pub mod member;
mod pages;
mod part_sink;
pub mod parts;
pub(crate) mod prior;
pub mod ranks;
pub mod rounds;
pub mod share;
#[cfg(test)]
mod tests;
