//! The layout-rule language: how a framework stores a model family's tensors.
//!
//! A [`table::Table`] declares stored tensors over the family's canonical tensors by named axes.
//! [`bind`] fixes the axes from shapes and configs, [`resolve`] turns a checkpoint's tensors into
//! boxes of canonical tensors, [`derive`] makes tables of tables, and [`crate::compose`] meets two such sets.

pub(crate) mod axis_words;
pub mod bind;
pub mod config;
pub mod cuts;
pub mod derive;
pub mod expr;
pub mod names;
pub mod resolve;
pub mod sets;
pub mod table;
