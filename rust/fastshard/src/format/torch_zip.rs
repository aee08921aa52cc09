//! torch zip files (`.pt`, `.bin`).
use super::ParsedFile;
use crate::error::{Error, Result};
use crate::storage::SourceFile;

/// Reads the header of a torch zip file.
pub fn parse(_file: &SourceFile) -> Result<ParsedFile> {
    unimplemented!()
}
/// The refusal of a legacy (non-zip) torch file.
pub fn legacy_refusal(_file: &SourceFile) -> Error {
    unimplemented!()
}
