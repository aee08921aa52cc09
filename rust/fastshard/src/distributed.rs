//! What several processes do together.

pub mod elsewhere;
pub(crate) mod foresee;
pub mod lending;
pub mod meeting;
pub mod member;
mod pages;
mod part_sink;
pub mod parts;
pub mod ranks;
pub mod rounds;
pub mod share;
#[cfg(test)]
mod tests;
