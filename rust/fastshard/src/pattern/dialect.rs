//! Python's regular expressions, read as its `re` reads them and written in the words that the engines share.
//!
//! Only what means the same in both is written; the rest is refused by its name.

use std::collections::HashMap;
use std::fmt::Write as _;

/// Levels of groups at most; the engines have limits of their own above it.
const DEEPEST: usize = 24;
/// States of a program at most, as the pattern spells them: a repeat counts as often as it repeats.
const MOST_STATES: u64 = 20_000;

/// Why a pattern cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// Python's `re` refuses it too.
    Invalid(String),
    /// It is Python's, and no engine here has the same.
    Unsupported(String),
}

/// What the names are that a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Of ASCII alone, and without a newline: as good as all names are.
    Plain,
    /// Any text.
    Any,
}

/// A pattern in the words of the engines.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    /// The pattern; its groups have the numbers that they have in Python.
    pub text: String,
    /// True if it looks around, refers back or does not go back: what no automaton has.
    pub is_fancy: bool,
    /// States of its program, about.
    pub states: u64,
}

/// Writes a pattern for names of a kind.
pub fn write(pattern: &str, names: Names) -> Result<Written, Reason> {
    let mut reader = Reader {
        chars: pattern.chars().collect(),
        at: 0,
        names,
        widths: vec![Some(Width::default())],
        numbers: HashMap::new(),
        is_fancy: false,
        lookbehinds: 0,
    };
    let mut flags = Flags::default();
    let part = reader.alternatives(&mut flags, 0)?;
    if reader.at < reader.chars.len() {
        return Err(invalid("unbalanced parenthesis"));
    }
    if part.states > MOST_STATES {
        return Err(unsupported(format!("repeats of more than {MOST_STATES} states")));
    }
    let text = if reader.is_fancy { part.text.replace(WORD_BOUNDARY, r"\b") } else { part.text };
    Ok(Written { text, is_fancy: reader.is_fancy, states: part.states })
}

/// A boundary of ASCII words, as automata have it; the other engine knows `\b` alone, which is the same for such names.
const WORD_BOUNDARY: &str = r"(?-u:\b)";

fn invalid(why: impl Into<String>) -> Reason {
    Reason::Invalid(why.into())
}

fn unsupported(what: impl Into<String>) -> Reason {
    Reason::Unsupported(what.into())
}

#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    ignore_case: bool,
    multi_line: bool,
    dot_all: bool,
    ascii: bool,
}

/// Characters that a part takes, at least and at most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Width {
    least: u64,
    most: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Other,
    Place,
    Repeat,
    Look,
}

struct Part {
    text: String,
    width: Width,
    states: u64,
    kind: Kind,
    /// True if a repeat in it takes as little as it may.
    is_lazy: bool,
}

impl Part {
    fn place(text: &str) -> Self {
        Part { text: text.into(), width: Width::default(), states: 1, kind: Kind::Place, is_lazy: false }
    }

    fn one(text: String) -> Self {
        Part { text, width: Width { least: 1, most: 1 }, states: 1, kind: Kind::Other, is_lazy: false }
    }

    fn empty() -> Self {
        Part { text: String::new(), width: Width::default(), states: 0, kind: Kind::Other, is_lazy: false }
    }
}

/// What a set or an escape stands for: a character, or a class of them as a set spells it.
enum Item {
    Char(char),
    Class(String),
}

struct Reader {
    chars: Vec<char>,
    at: usize,
    names: Names,
    /// Widths of the groups by their numbers; None for one that is still open.
    widths: Vec<Option<Width>>,
    numbers: HashMap<String, usize>,
    is_fancy: bool,
    lookbehinds: usize,
}

impl Reader {
    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let found = self.peek();
        self.at += usize::from(found.is_some());
        found
    }

    fn take(&mut self, wanted: &str) -> bool {
        let length = wanted.chars().count();
        let is_there = self
            .chars
            .get(self.at..self.at + length)
            .is_some_and(|found| wanted.chars().eq(found.iter().copied()));
        self.at += if is_there { length } else { 0 };
        is_there
    }

    /// Takes the text up to a sign, and the sign.
    fn until(&mut self, end: char) -> Result<String, Reason> {
        let start = self.at;
        while let Some(found) = self.next() {
            if found == end {
                return Ok(self.chars[start..self.at - 1].iter().collect());
            }
        }
        Err(invalid(format!("missing {end}")))
    }

    fn alternatives(&mut self, flags: &mut Flags, depth: usize) -> Result<Part, Reason> {
        if depth > DEEPEST {
            return Err(unsupported(format!("groups in more than {DEEPEST} levels")));
        }
        let mut whole = self.sequence(flags, depth, true)?;
        while self.take("|") {
            let next = self.sequence(flags, depth, false)?;
            whole.text.push('|');
            whole.text.push_str(&next.text);
            whole.is_lazy |= next.is_lazy;
            whole.width.least = whole.width.least.min(next.width.least);
            whole.width.most = whole.width.most.max(next.width.most);
            whole.states = whole.states.saturating_add(next.states).saturating_add(1);
        }
        whole.kind = Kind::Other;
        Ok(whole)
    }

    fn sequence(&mut self, flags: &mut Flags, depth: usize, is_first: bool) -> Result<Part, Reason> {
        let mut whole = Part::empty();
        let mut last: Option<Part> = None;
        let mut is_begin = depth == 0 && is_first;
        while let Some(sign) = self.peek() {
            if matches!(sign, '|' | ')') {
                break;
            }
            self.at += 1;
            if let Some((least, most)) = self.repeat(sign)? {
                let part = last.take().ok_or_else(|| invalid("nothing to repeat"))?;
                last = Some(self.repeated(part, least, most)?);
                continue;
            }
            if sign == '(' && self.take("?#") {
                self.until(')')?;
                continue;
            }
            if sign == '(' && is_begin && self.global_flags(flags)? {
                continue;
            }
            is_begin = false;
            if let Some(part) = last.replace(self.atom(sign, flags, depth)?) {
                join(&mut whole, &part);
            }
        }
        if let Some(part) = last {
            join(&mut whole, &part);
        }
        Ok(whole)
    }

    /// The bounds of a repeat that begins with a sign; None for a sign that is none.
    fn repeat(&mut self, sign: char) -> Result<Option<(u64, Option<u64>)>, Reason> {
        Ok(match sign {
            '*' => Some((0, None)),
            '+' => Some((1, None)),
            '?' => Some((0, Some(1))),
            '{' if self.peek() != Some('}') => {
                let start = self.at;
                let low = self.digits();
                let high = if self.take(",") { self.digits() } else { low.clone() };
                if !self.take("}") {
                    self.at = start;
                    return Ok(None);
                }
                let number = |digits: &str| {
                    digits.parse::<u32>().map_err(|_| unsupported("a repeat of more than 32 bits"))
                };
                let least = if low.is_empty() { 0 } else { number(&low)? };
                let most = if high.is_empty() { None } else { Some(u64::from(number(&high)?)) };
                if most.is_some_and(|most| most < u64::from(least)) {
                    return Err(invalid("min repeat greater than max repeat"));
                }
                Some((u64::from(least), most))
            }
            _ => None,
        })
    }

    fn digits(&mut self) -> String {
        let start = self.at;
        while self.peek().is_some_and(|sign| sign.is_ascii_digit()) {
            self.at += 1;
        }
        self.chars[start..self.at].iter().collect()
    }

    fn repeated(&mut self, part: Part, least: u64, most: Option<u64>) -> Result<Part, Reason> {
        match part.kind {
            Kind::Place => return Err(invalid("nothing to repeat")),
            Kind::Repeat => return Err(invalid("multiple repeat")),
            Kind::Look => return Err(unsupported("a look-around that is repeated")),
            Kind::Other => {}
        }
        let states = part.states.saturating_add(1).saturating_mul(most.unwrap_or(least + 1).max(1));
        if states > MOST_STATES {
            // The engines would unfold it before they count.
            return Err(unsupported(format!("repeats of more than {MOST_STATES} states")));
        }
        let signs = match (least, most) {
            (0, None) => "*".into(),
            (1, None) => "+".into(),
            (0, Some(1)) => "?".into(),
            (least, None) => format!("{{{least},}}"),
            (least, Some(most)) => format!("{{{least},{most}}}"),
        };
        let mut text = format!("(?:{}){signs}", part.text);
        let mut is_lazy = part.is_lazy;
        if self.take("?") {
            text.push('?');
            is_lazy = true;
        } else if self.take("+") {
            self.is_fancy = true;
            check_kept(is_lazy)?;
            text = format!("(?>{text})");
        }
        let width = Width {
            least: part.width.least.saturating_mul(least),
            most: match (part.width.most, most) {
                (0, _) => 0,
                (_, None) => u64::MAX,
                (wide, Some(most)) => wide.saturating_mul(most),
            },
        };
        Ok(Part { text, width, states, kind: Kind::Repeat, is_lazy })
    }

    /// Takes flags for all that follows, which stand at the begin alone.
    fn global_flags(&mut self, flags: &mut Flags) -> Result<bool, Reason> {
        let start = self.at;
        if self.take("?") && self.peek().is_some_and(|sign| "aimsxuL".contains(sign)) {
            let mut changed = *flags;
            while let Some(sign) = self.next() {
                if sign == ')' {
                    *flags = changed;
                    return Ok(true);
                }
                if !"aimsxuL".contains(sign) {
                    break;
                }
                set_flag(&mut changed, sign, true)?;
            }
        }
        self.at = start;
        Ok(false)
    }

    fn atom(&mut self, sign: char, flags: &Flags, depth: usize) -> Result<Part, Reason> {
        match sign {
            '(' => self.group(flags, depth),
            '[' => self.set(flags),
            '.' if flags.dot_all => Ok(Part::one("(?s:.)".into())),
            '.' => Ok(Part::one(r"[^\n]".into())),
            '^' => Ok(Part::place(if flags.multi_line { "(?m:^)" } else { r"\A" })),
            '$' if flags.multi_line => Ok(Part::place("(?m:$)")),
            '$' if self.names == Names::Plain => Ok(Part::place(r"\z")),
            '$' => {
                // Before a newline at the end too.
                self.is_fancy = true;
                Ok(Part::place(r"(?=\n?\z)"))
            }
            '\\' => self.escape(flags),
            _ => self.literal(sign, flags),
        }
    }

    fn literal(&self, sign: char, flags: &Flags) -> Result<Part, Reason> {
        let mut text = String::new();
        match self.other_case(sign, flags)? {
            Some(other) => write_all(&mut text, format_args!("[{sign}{other}]")),
            None => write_char(&mut text, sign),
        }
        Ok(Part::one(text))
    }

    /// A letter in the other case, where case is ignored; of letters outside ASCII engines have other tables.
    fn other_case(&self, sign: char, flags: &Flags) -> Result<Option<char>, Reason> {
        if !flags.ignore_case {
            return Ok(None);
        }
        if !sign.is_ascii() || self.names == Names::Any {
            return Err(unsupported("(?i) with more than ASCII"));
        }
        Ok(match sign {
            'a'..='z' => Some(sign.to_ascii_uppercase()),
            'A'..='Z' => Some(sign.to_ascii_lowercase()),
            _ => None,
        })
    }

    fn group(&mut self, flags: &Flags, depth: usize) -> Result<Part, Reason> {
        let mut inner = *flags;
        if !self.take("?") {
            return self.capturing(&mut inner, depth, None);
        }
        match self.next() {
            Some('P') => self.named(&mut inner, depth),
            Some(':') => self.enclosed("(?:", &mut inner, depth),
            Some('>') => {
                self.is_fancy = true;
                let part = self.enclosed("(?>", &mut inner, depth)?;
                check_kept(part.is_lazy)?;
                Ok(part)
            }
            Some('=') => self.look("(?=", &mut inner, depth),
            Some('!') => self.look("(?!", &mut inner, depth),
            Some('<') if self.take("=") => self.look("(?<=", &mut inner, depth),
            Some('<') if self.take("!") => self.look("(?<!", &mut inner, depth),
            Some('(') => Err(unsupported("a condition, (?(...)...|...)")),
            Some(sign) if "aimsxuL-".contains(sign) => {
                self.at -= 1;
                self.scoped_flags(&mut inner)?;
                self.enclosed("(?:", &mut inner, depth)
            }
            Some(sign) => Err(invalid(format!("unknown extension ?{sign}"))),
            None => Err(invalid("unexpected end of pattern")),
        }
    }

    fn named(&mut self, flags: &mut Flags, depth: usize) -> Result<Part, Reason> {
        if self.take("<") {
            let name = self.until('>')?;
            check_name(&name)?;
            return self.capturing(flags, depth, Some(name));
        }
        if self.take("=") {
            let name = self.until(')')?;
            check_name(&name)?;
            let number = self.numbers.get(&name).copied();
            return self
                .reference(number.ok_or_else(|| invalid(format!("unknown group name {name:?}")))?, flags);
        }
        Err(invalid("unknown extension ?P"))
    }

    fn capturing(&mut self, flags: &mut Flags, depth: usize, name: Option<String>) -> Result<Part, Reason> {
        let number = self.widths.len();
        self.widths.push(None);
        if let Some(name) = name {
            if self.numbers.insert(name, number).is_some() {
                return Err(invalid("redefinition of a group name"));
            }
        }
        let part = self.enclosed("(", flags, depth)?;
        self.widths[number] = Some(part.width);
        Ok(part)
    }

    fn enclosed(&mut self, open: &str, flags: &mut Flags, depth: usize) -> Result<Part, Reason> {
        let mut part = self.alternatives(flags, depth + 1)?;
        if !self.take(")") {
            return Err(invalid("missing ), unterminated subpattern"));
        }
        part.text = format!("{open}{})", part.text);
        part.states = part.states.saturating_add(1);
        Ok(part)
    }

    fn look(&mut self, open: &str, flags: &mut Flags, depth: usize) -> Result<Part, Reason> {
        self.is_fancy = true;
        let is_behind = open.starts_with("(?<");
        self.lookbehinds += usize::from(is_behind);
        let mut part = self.enclosed(open, flags, depth)?;
        self.lookbehinds -= usize::from(is_behind);
        if is_behind && part.width.least != part.width.most {
            return Err(invalid("look-behind requires fixed-width pattern"));
        }
        part.width = Width::default();
        part.kind = Kind::Look;
        Ok(part)
    }

    fn scoped_flags(&mut self, flags: &mut Flags) -> Result<(), Reason> {
        let mut is_on = true;
        let (mut count, mut turned_off) = (0, 0);
        loop {
            match self.next() {
                Some(':') if is_on || turned_off > 0 => return Ok(()),
                Some('-') if is_on => is_on = false,
                Some(')') if is_on && count > 0 => {
                    return Err(invalid("global flags not at the start of the expression"))
                }
                Some(sign) if "aimsxuL".contains(sign) => {
                    if !is_on && "auL".contains(sign) {
                        return Err(invalid("bad inline flags: cannot turn off flags 'a', 'u' and 'L'"));
                    }
                    set_flag(flags, sign, is_on)?;
                    count += 1;
                    turned_off += usize::from(!is_on);
                }
                Some(sign) => return Err(invalid(format!("unknown flag {sign:?}"))),
                None => return Err(invalid("missing flag")),
            }
        }
    }

    fn reference(&mut self, number: usize, flags: &Flags) -> Result<Part, Reason> {
        let Some(width) = self.widths.get(number) else {
            return Err(invalid(format!("invalid group reference {number}")));
        };
        let Some(width) = *width else { return Err(invalid("cannot refer to an open group")) };
        if flags.ignore_case {
            return Err(unsupported("a back reference under (?i)"));
        }
        if self.lookbehinds > 0 {
            return Err(unsupported("a back reference in a look-behind"));
        }
        self.is_fancy = true;
        Ok(Part { text: format!(r"(?:\{number})"), width, states: 1, kind: Kind::Other, is_lazy: false })
    }

    fn escape(&mut self, flags: &Flags) -> Result<Part, Reason> {
        let sign = self.next().ok_or_else(|| invalid("bad escape (end of pattern)"))?;
        match sign {
            'A' => Ok(Part::place(r"\A")),
            'Z' => Ok(Part::place(r"\z")),
            'b' if self.names == Names::Plain => Ok(Part::place(WORD_BOUNDARY)),
            'b' => Err(unsupported(r"\b with more than ASCII")),
            // Of the empty text versions of Python have different ones.
            'B' => Err(unsupported(r"\B")),
            '0' => {
                let code = self.octal(0, 2);
                self.literal(code, flags)
            }
            '1'..='9' => {
                let mut number = sign as usize - '0' as usize;
                if let Some(next) = self.peek().filter(char::is_ascii_digit) {
                    self.at += 1;
                    let is_octal = |sign: char| ('0'..='7').contains(&sign);
                    if is_octal(sign) && is_octal(next) && self.peek().is_some_and(is_octal) {
                        if sign > '3' {
                            return Err(invalid("octal escape value outside of range 0-0o377"));
                        }
                        self.at -= 2;
                        let code = self.octal(0, 3);
                        return self.literal(code, flags);
                    }
                    number = number * 10 + (next as usize - '0' as usize);
                }
                self.reference(number, flags)
            }
            _ => match self.escaped(sign, flags)? {
                Item::Char(found) => self.literal(found, flags),
                Item::Class(class) => Ok(Part::one(format!("[{class}]"))),
            },
        }
    }

    fn octal(&mut self, mut code: u32, most: usize) -> char {
        for _ in 0..most {
            match self.peek().and_then(|sign| sign.to_digit(8)) {
                Some(digit) => code = code * 8 + digit,
                None => break,
            }
            self.at += 1;
        }
        // At most 0o377, or 0o77 where two digits are taken.
        char::from_u32(code).unwrap_or('\0')
    }

    /// What an escape stands for that is the same in a set and outside of one.
    fn escaped(&mut self, sign: char, flags: &Flags) -> Result<Item, Reason> {
        Ok(Item::Char(match sign {
            'a' => '\x07',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            'x' => self.hexadecimal(2)?,
            'u' => self.hexadecimal(4)?,
            'U' => self.hexadecimal(8)?,
            'N' => return Err(unsupported(r"\N{...}")),
            'd' | 'D' | 's' | 'S' | 'w' | 'W' => return Ok(Item::Class(self.class(sign, flags))),
            _ if sign.is_ascii_alphanumeric() => return Err(invalid(format!("bad escape \\{sign}"))),
            _ => sign,
        }))
    }

    fn hexadecimal(&mut self, length: usize) -> Result<char, Reason> {
        let digits = self.chars.get(self.at..self.at + length).unwrap_or_default();
        let code =
            digits.iter().try_fold(0u32, |code, digit| Some(code.checked_mul(16)? + digit.to_digit(16)?));
        let code = code.filter(|_| !digits.is_empty()).ok_or_else(|| invalid("incomplete escape"))?;
        self.at += length;
        match char::from_u32(code) {
            Some(found) => Ok(found),
            None if code > 0x10ffff => Err(invalid("bad escape: beyond Unicode")),
            None => Err(unsupported("a half of a surrogate pair")),
        }
    }

    /// A class as a set spells it; Python's words and blanks are others than the engines'.
    fn class(&self, sign: char, flags: &Flags) -> String {
        let is_ascii = flags.ascii || self.names == Names::Plain;
        let inner = match (sign.to_ascii_lowercase(), is_ascii) {
            ('d', true) => "0-9",
            ('d', false) => r"\p{Nd}",
            ('w', true) => "0-9A-Za-z_",
            ('w', false) => r"\p{L}\p{N}_",
            (_, true) if flags.ascii => r"\t-\r\x20",
            (_, true) => r"\t-\r\x1c-\x20",
            (_, false) => {
                r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
            }
        };
        if sign.is_ascii_lowercase() {
            inner.into()
        } else {
            format!("[^{inner}]")
        }
    }

    fn set(&mut self, flags: &Flags) -> Result<Part, Reason> {
        let mut text = if self.take("^") { String::from("[^") } else { String::from("[") };
        let mut is_empty = true;
        loop {
            let sign = self.next().ok_or_else(|| invalid("unterminated character set"))?;
            if sign == ']' && !is_empty {
                break;
            }
            is_empty = false;
            let first = self.item(sign, flags)?;
            if !self.take("-") {
                self.add(&mut text, &first, flags)?;
                continue;
            }
            let sign = self.next().ok_or_else(|| invalid("unterminated character set"))?;
            if sign == ']' {
                self.add(&mut text, &first, flags)?;
                self.add(&mut text, &Item::Char('-'), flags)?;
                break;
            }
            match (first, self.item(sign, flags)?) {
                (Item::Char(low), Item::Char(high)) if low <= high => {
                    self.add_range(&mut text, low, high, flags)?
                }
                _ => return Err(invalid("bad character range")),
            }
        }
        text.push(']');
        Ok(Part::one(text))
    }

    fn item(&mut self, sign: char, flags: &Flags) -> Result<Item, Reason> {
        if sign != '\\' {
            return Ok(Item::Char(sign));
        }
        let sign = self.next().ok_or_else(|| invalid("unterminated character set"))?;
        match sign {
            'b' => Ok(Item::Char('\x08')),
            '0'..='7' => {
                self.at -= 1;
                let is_beyond = sign > '3'
                    && self
                        .chars
                        .get(self.at..self.at + 3)
                        .is_some_and(|all| all.iter().all(|one| one.is_digit(8)));
                if is_beyond {
                    return Err(invalid("octal escape value outside of range 0-0o377"));
                }
                Ok(Item::Char(self.octal(0, 3)))
            }
            _ => self.escaped(sign, flags),
        }
    }

    fn add(&self, text: &mut String, item: &Item, flags: &Flags) -> Result<(), Reason> {
        match item {
            Item::Char(sign) => self.add_range(text, *sign, *sign, flags)?,
            Item::Class(class) => text.push_str(class),
        }
        Ok(())
    }

    fn add_range(&self, text: &mut String, low: char, high: char, flags: &Flags) -> Result<(), Reason> {
        write_range(text, low, high);
        if flags.ignore_case {
            self.other_case(low, flags)?;
            self.other_case(high, flags)?;
            for (begin, end, shift) in [('a', 'z', -32), ('A', 'Z', 32)] {
                let (from, to) = (low.max(begin), high.min(end));
                let other = |sign: char| u32::try_from(sign as i32 + shift).ok().and_then(char::from_u32);
                if let (true, Some(from), Some(to)) = (from <= to, other(from), other(to)) {
                    write_range(text, from, to);
                }
            }
        }
        Ok(())
    }
}

/// Refuses what takes as little as it may in what is not gone back into: fancy-regex 0.20 does not find all of Python's matches.
fn check_kept(is_lazy: bool) -> Result<(), Reason> {
    match is_lazy {
        true => Err(unsupported("a lazy repeat in an atomic group or a possessive repeat")),
        false => Ok(()),
    }
}

fn join(whole: &mut Part, part: &Part) {
    whole.text.push_str(&part.text);
    whole.is_lazy |= part.is_lazy;
    whole.width.least = whole.width.least.saturating_add(part.width.least);
    whole.width.most = whole.width.most.saturating_add(part.width.most);
    whole.states = whole.states.saturating_add(part.states);
}

fn set_flag(flags: &mut Flags, sign: char, is_on: bool) -> Result<(), Reason> {
    match sign {
        'i' => flags.ignore_case = is_on,
        'm' => flags.multi_line = is_on,
        's' => flags.dot_all = is_on,
        'a' => flags.ascii = is_on,
        'u' => flags.ascii = false,
        'x' => return Err(unsupported("(?x)")),
        _ => return Err(invalid("bad inline flags: cannot use 'L' flag with a str pattern")),
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), Reason> {
    let mut signs = name.chars();
    let is_name = signs.next().is_some_and(|sign| sign.is_alphabetic() || sign == '_')
        && signs.all(|sign| sign.is_alphanumeric() || sign == '_');
    match is_name {
        true => Ok(()),
        false => Err(invalid(format!("bad character in group name {name:?}"))),
    }
}

fn write_all(text: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing into a text does not fail.
    let _ = text.write_fmt(what);
}

fn write_char(text: &mut String, sign: char) {
    match sign.is_ascii_alphanumeric() || sign == '_' {
        true => text.push(sign),
        false => write_all(text, format_args!("\\x{{{:x}}}", sign as u32)),
    }
}

fn write_range(text: &mut String, low: char, high: char) {
    write_char(text, low);
    if low < high {
        text.push('-');
        write_char(text, high);
    }
}
