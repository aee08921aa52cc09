//! Regular expressions that strangers wrote, matched as Python's `re` does, within a number of steps.
//!
//! A pattern that an automaton can match takes a step for each character; an engine with bounded backtracking
//! matches the others. All patterns of a file share one budget: a file that exceeds it is refused, with the
//! pattern that was tried last.

pub mod dialect;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use regex_automata::dfa::{dense, Automaton, StartKind};
use regex_automata::nfa::thompson::{self, pikevm::PikeVM, WhichCaptures, NFA};
use regex_automata::{util::syntax, Anchored, Input};

use crate::codes;
use crate::error::{Error, Finding};
use dialect::{Names, Reason};

/// Steps that the patterns of one file may take: some seconds of one processor.
pub const MOST_STEPS: u64 = 500_000_000;
/// Steps of the work that each try of a pattern takes.
const OF_A_TRY: u64 = 16;
/// Steps of a pattern's program, for each byte of it.
const OF_A_BYTE: u64 = 8;
/// Maximum bytes of a program, and of the data that makes it.
const LARGEST: usize = 1 << 18;
/// Backtracking limits for one name, tried in turn: a few steps suffice for the patterns that people write.
const GOING_BACK: [u64; 3] = [128, 8192, 1 << 20];
/// Characters of a pattern that a message shows.
const SHOWN: usize = 80;

/// The part of a name that a pattern must match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Its beginning: `re.match`.
    Start,
    /// All of it: `re.fullmatch`.
    Full,
    /// All of it, or the part after a dot: `re.match(rf"(.*\.)?({pattern})$", name)`, as peft names modules.
    Module,
}

/// The steps that the patterns of one file may take together.
#[derive(Debug)]
pub struct Budget {
    file: String,
    most: u64,
    taken: AtomicU64,
}

impl Budget {
    /// A budget for the patterns of a file.
    pub fn new(file: impl Into<String>, most: u64) -> Self {
        Budget { file: file.into(), most, taken: AtomicU64::new(0) }
    }

    /// The steps taken so far.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    fn take(&self, steps: u64, pattern: &str) -> Result<(), Error> {
        let taken = self.taken.fetch_add(steps, Ordering::Relaxed);
        if taken.saturating_add(steps) <= self.most {
            return Ok(());
        }
        let finding = Finding::new(codes::UNSUPPORTED, "matching the patterns of this file takes too long")
            .expected(format_args!("at most {} steps for all of them", self.most), shown(pattern))
            .help(
                "name the modules, or shorten the pattern: nested repetitions and alternatives take longest",
            );
        Err(finding.file(&self.file).into())
    }

    fn refuse(&self, pattern: &str, reason: Reason) -> Error {
        let (code, what) = match reason {
            Reason::Invalid(why) => {
                (codes::BAD_VALUE, format!("a pattern is no regular expression of Python: {why}"))
            }
            Reason::Unsupported(what) => {
                (codes::UNSUPPORTED, format!("a pattern has what is not matched here: {what}"))
            }
        };
        let finding = Finding::new(code, what)
            .expected(
                "a pattern that Python's re takes, of names, classes, groups, repetitions and look-around",
                shown(pattern),
            )
            .help("correct the pattern, or name the modules");
        finding.file(&self.file).into()
    }
}

/// Patterns of one list, in its order.
pub struct Patterns {
    budget: Arc<Budget>,
    how: How,
    all: Vec<Pattern>,
}

struct Pattern {
    text: String,
    /// Its characters, if it has no special signs except dots, which are None.
    plain: Option<Vec<Option<u8>>>,
    /// Programs for plain names, and for any.
    programs: [OnceLock<Program>; 2],
}

enum Program {
    Table(Box<dense::DFA<Vec<u32>>>),
    States(Box<PikeVM>),
    GoingBack(Vec<fancy_regex::Regex>),
}

impl Patterns {
    /// Patterns of a file, each read before any is tried.
    ///
    /// # Errors
    ///
    /// If one is not a regular expression, or has a construct that is not supported.
    pub fn new(texts: Vec<String>, how: How, budget: Arc<Budget>) -> Result<Self, Error> {
        let mut all = Vec::with_capacity(texts.len());
        for text in texts {
            budget.take(OF_A_TRY.saturating_add(text.len() as u64), &text)?;
            let plain = plain(&text);
            if plain.is_none() {
                dialect::write(&spelled(&text, how), Names::Plain)
                    .map_err(|reason| budget.refuse(&text, reason))?;
            }
            all.push(Pattern { text, plain, programs: [OnceLock::new(), OnceLock::new()] });
        }
        Ok(Patterns { budget, how, all })
    }

    /// The first pattern that matches a name.
    ///
    /// # Errors
    ///
    /// If the budget has no steps left.
    pub fn first(&self, name: &str) -> Result<Option<usize>, Error> {
        let names = if name.is_ascii() && !name.contains('\n') { Names::Plain } else { Names::Any };
        for (number, pattern) in self.all.iter().enumerate() {
            if self.is_match(pattern, name, names)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    fn is_match(&self, pattern: &Pattern, name: &str, names: Names) -> Result<bool, Error> {
        if let (Some(plain), Names::Plain) = (&pattern.plain, names) {
            self.budget.take(2, &pattern.text)?;
            return Ok(is_plain_match(plain, name.as_bytes(), self.how));
        }
        let slot = &pattern.programs[usize::from(names == Names::Any)];
        let program = match slot.get() {
            Some(program) => program,
            None => {
                let compiled = self.compile(pattern, names)?;
                slot.get_or_init(|| compiled)
            }
        };
        self.run(program, pattern, name)
    }

    fn run(&self, program: &Program, pattern: &Pattern, name: &str) -> Result<bool, Error> {
        let steps = OF_A_TRY + name.len() as u64;
        let input = Input::new(name).anchored(Anchored::Yes).earliest(true);
        let failed = |what: String| self.budget.refuse(&pattern.text, Reason::Unsupported(what));
        match program {
            Program::Table(table) => {
                self.budget.take(steps, &pattern.text)?;
                table
                    .try_search_fwd(&input)
                    .map(|found| found.is_some())
                    .map_err(|error| failed(error.to_string()))
            }
            Program::States(states) => {
                self.budget
                    .take(steps.saturating_mul(states.get_nfa().states().len() as u64), &pattern.text)?;
                Ok(states.is_match(&mut states.create_cache(), input))
            }
            Program::GoingBack(limited) => {
                for (regex, limit) in limited.iter().zip(GOING_BACK) {
                    // What it delegates goes through the rest of the name.
                    self.budget.take(limit.saturating_mul(1 + name.len() as u64 / 64), &pattern.text)?;
                    match regex.is_match(name) {
                        Ok(found) => return Ok(found),
                        Err(fancy_regex::Error::RuntimeError(
                            fancy_regex::RuntimeError::BacktrackLimitExceeded,
                        )) => {}
                        Err(error) => return Err(failed(error.to_string())),
                    }
                }
                // One name alone takes more than any should.
                self.budget.take(self.budget.most, &pattern.text)?;
                Ok(false)
            }
        }
    }

    fn compile(&self, pattern: &Pattern, names: Names) -> Result<Program, Error> {
        let refuse = |reason| self.budget.refuse(&pattern.text, reason);
        let failed = |error: &dyn std::fmt::Display| refuse(Reason::Unsupported(error.to_string()));
        let written = dialect::write(&spelled(&pattern.text, self.how), names).map_err(refuse)?;
        let end = if self.how == How::Full { r"\z" } else { "" };
        let text = format!(r"\A(?:{}){end}", written.text);
        self.budget.take(
            OF_A_BYTE.saturating_mul((text.len() as u64).saturating_add(written.states * 16)),
            &pattern.text,
        )?;
        if written.is_fancy {
            let build = |limit: &u64| {
                fancy_regex::RegexBuilder::new(&text)
                    .backtrack_limit(usize::try_from(*limit).unwrap_or(usize::MAX))
                    .delegate_size_limit(1 << 20)
                    .delegate_dfa_size_limit(LARGEST)
                    .build()
            };
            let limited: Result<Vec<_>, _> = GOING_BACK.iter().map(build).collect();
            return limited.map(Program::GoingBack).map_err(|error| failed(&error));
        }
        let nfa = NFA::compiler()
            .configure(NFA::config().which_captures(WhichCaptures::None).nfa_size_limit(Some(1 << 23)))
            .syntax(syntax::Config::new().nest_limit(200))
            .build(&text)
            .map_err(|error: thompson::BuildError| failed(&error))?;
        let config = dense::Config::new()
            .start_kind(StartKind::Anchored)
            .accelerate(false)
            .dfa_size_limit(Some(LARGEST))
            .determinize_size_limit(Some(LARGEST));
        Ok(match dense::Builder::new().configure(config).build_from_nfa(&nfa) {
            Ok(table) => {
                self.budget.take(OF_A_BYTE * table.memory_usage() as u64, &pattern.text)?;
                Program::Table(Box::new(table))
            }
            // Its table would be too large: its states are followed then, a name's characters times as many.
            Err(_) => {
                self.budget.take(OF_A_BYTE * LARGEST as u64, &pattern.text)?;
                Program::States(Box::new(PikeVM::new_from_nfa(nfa).map_err(|error| failed(&error))?))
            }
        })
    }
}

/// A pattern in the form of `re.match` or `re.fullmatch`.
fn spelled(pattern: &str, how: How) -> String {
    match how {
        How::Start | How::Full => pattern.into(),
        How::Module => format!(r"(.*\.)?({pattern})$"),
    }
}

/// The characters of a pattern without signs; a dot is any of them.
fn plain(pattern: &str) -> Option<Vec<Option<u8>>> {
    let mut found = Vec::with_capacity(pattern.len());
    let mut bytes = pattern.bytes();
    while let Some(byte) = bytes.next() {
        found.push(match byte {
            b'.' => None,
            b'\\' => Some(bytes.next().filter(|next| next.is_ascii_punctuation())?),
            b'^' | b'$' | b'*' | b'+' | b'?' | b'{' | b'}' | b'[' | b']' | b'(' | b')' | b'|' => return None,
            byte if byte.is_ascii() => Some(byte),
            _ => return None,
        });
    }
    Some(found)
}

fn is_plain_match(plain: &[Option<u8>], name: &[u8], how: How) -> bool {
    let Some(more) = name.len().checked_sub(plain.len()) else { return false };
    let start = match how {
        How::Start => 0,
        How::Full if more > 0 => return false,
        How::Full => 0,
        How::Module if more > 0 && name[more - 1] != b'.' => return false,
        How::Module => more,
    };
    // Names of one model begin alike.
    name[start..start + plain.len()]
        .iter()
        .zip(plain)
        .rev()
        .all(|(byte, wanted)| wanted.is_none_or(|wanted| wanted == *byte))
}

fn shown(pattern: &str) -> String {
    match pattern.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}... ({} characters)", &pattern[..end], pattern.chars().count()),
        None => pattern.into(),
    }
}

#[cfg(test)]
mod tests;
