//! Topics of the log: the logger that the records of each go to. Without a listener a record costs one comparison.

/// Files and their headers.
pub const CATALOG: &str = "fastshard.catalog";
/// The outputs and the bytes that they are made from.
pub const PLAN: &str = "fastshard.plan";
/// Threads, memory and ways of reading.
pub const ENGINE: &str = "fastshard.engine";
/// The staging directory, its seal and the renames.
pub const PUBLISH: &str = "fastshard.publish";
/// Runs of several processes.
pub const PROCESSES: &str = "fastshard.processes";

/// All of them.
pub const ALL: [&str; 5] = [CATALOG, PLAN, ENGINE, PUBLISH, PROCESSES];
