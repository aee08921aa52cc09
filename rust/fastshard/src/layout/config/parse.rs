//! The grammar of expressions over a model's config.
//!
//! ```text
//! expr := or ('??' or)*
//! or   := and ('or' and)*          and := not ('and' not)*        not := 'not' not | cmp
//! cmp  := sum (('=='|'!='|'<'|'<='|'>'|'>='|'in') sum)?
//! sum  := prod (('+'|'-') prod)*   prod := atom (('*'|'/'|'//'|'%') atom)*
//! atom := (INT|STRING|'true'|'false'|'null'|'[' list ']'|NAME|'('expr')'|'has('NAME('.'NAME)*')'|'int('expr')'|
//!          'len('expr')'|'stored('STRING')') ('.'NAME|'['expr']')*
//! ```

use std::ops::Range;

use crate::layout::names::Pattern;

/// Longest expression, in bytes.
const MAX_LENGTH: usize = 512;
/// Deepest nesting of brackets and `not`.
pub(super) const MAX_DEPTH: usize = 16;

/// A parsed expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expression {
    text: String,
    pub(super) root: Node,
}

/// A part of an expression, and where it stands in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) kind: Kind,
    span: Range<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Null,
    Bool(bool),
    Int(i64),
    Text(String),
    List(Vec<Node>),
    /// A position, an axis, a fact, a set, or else a key of the config.
    Name(String),
    Field(Box<Node>, String),
    Item(Box<Node>, Box<Node>),
    Has(Vec<String>),
    Int64(Box<Node>),
    Length(Box<Node>),
    Stored(Box<Pattern>),
    Not(Box<Node>),
    Binary(Op, Box<Node>, Box<Node>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    Coalesce,
    Or,
    And,
    Equal,
    Unequal,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
}

#[derive(Debug, Clone, PartialEq)]
enum Token<'a> {
    Int(i64),
    Text(&'a str),
    Word(&'a str),
    Sign(&'static str),
    End,
}

/// Signs of the language, the longer ones first.
const SIGNS: [&str; 20] = [
    "??", "==", "!=", "<=", ">=", "//", "<", ">", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",", ".", "?",
];
/// Words that are no names.
const WORDS: [&str; 11] = ["true", "false", "null", "and", "or", "not", "in", "has", "int", "len", "stored"];

type Parsed<T> = Result<T, String>;

fn tokens(text: &str) -> Parsed<Vec<(Token<'_>, Range<usize>)>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let run = |of: fn(char) -> bool| rest.find(|c| !of(c)).unwrap_or(rest.len());
        let (token, length) = if first.is_ascii_whitespace() {
            at += 1;
            continue;
        } else if first.is_ascii_digit() {
            let length = run(|c| c.is_ascii_alphanumeric() || c == '_');
            let number = rest[..length].parse();
            let number = number.map_err(|_| format!("{:?} is no integer of 64 bits", &rest[..length]))?;
            (Token::Int(number), length)
        } else if first.is_ascii_alphabetic() || first == '_' {
            let length = run(|c| c.is_ascii_alphanumeric() || c == '_');
            (Token::Word(&rest[..length]), length)
        } else if first == '\'' || first == '"' {
            let length =
                rest[1..].find(first).ok_or_else(|| format!("no {first} ends the text at {rest:?}"))?;
            (Token::Text(&rest[1..=length]), length + 2)
        } else if let Some(sign) = SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            (Token::Sign(sign), sign.len())
        } else {
            return Err(format!("{first:?} is no part of an expression"));
        };
        found.push((token, at..at + length));
        at += length;
    }
    found.push((Token::End, text.len()..text.len()));
    Ok(found)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Token<'a>, Range<usize>)>,
    at: usize,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> &Token<'a> {
        &self.tokens[self.at].0
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.tokens[self.at].0.clone();
        self.at = (self.at + 1).min(self.tokens.len() - 1);
        token
    }

    fn eat(&mut self, sign: &str) -> bool {
        let hit = match self.peek() {
            Token::Sign(s) => *s == sign,
            Token::Word(w) => *w == sign,
            _ => false,
        };
        self.at += usize::from(hit);
        hit
    }

    fn need(&mut self, sign: &str) -> Parsed<()> {
        match self.eat(sign) {
            true => Ok(()),
            false => self.fail(&format!("'{sign}'")),
        }
    }

    fn fail<T>(&self, wanted: &str) -> Parsed<T> {
        let rest: String = self.text[self.tokens[self.at].1.start..].chars().take(12).collect();
        Err(format!("expected {wanted} before {rest:?}"))
    }

    /// A node over all that was read since `start`.
    fn node(&self, start: usize, kind: Kind) -> Node {
        let end = self.tokens[self.at.max(1) - 1].1.end;
        Node { kind, span: start..end.max(start) }
    }

    fn deeper<T>(&mut self, read: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("nested deeper than {MAX_DEPTH}"));
        }
        let read = read(self);
        self.depth -= 1;
        read
    }

    /// Operators of one strength, from the left.
    fn chain(&mut self, ops: &[(&str, Op)], next: fn(&mut Self) -> Parsed<Node>, once: bool) -> Parsed<Node> {
        let start = self.tokens[self.at].1.start;
        let mut left = next(self)?;
        while let Some((_, op)) = ops.iter().find(|(sign, _)| self.eat(sign)) {
            let right = next(self)?;
            left = self.node(start, Kind::Binary(*op, Box::new(left), Box::new(right)));
            if once {
                break;
            }
        }
        Ok(left)
    }

    fn expr(&mut self) -> Parsed<Node> {
        self.deeper(|p| p.chain(&[("??", Op::Coalesce)], Self::or, false))
    }

    fn or(&mut self) -> Parsed<Node> {
        self.chain(&[("or", Op::Or)], Self::and, false)
    }

    fn and(&mut self) -> Parsed<Node> {
        self.chain(&[("and", Op::And)], Self::not, false)
    }

    fn not(&mut self) -> Parsed<Node> {
        let start = self.tokens[self.at].1.start;
        if self.eat("not") {
            let inner = self.deeper(Self::not)?;
            return Ok(self.node(start, Kind::Not(Box::new(inner))));
        }
        let signs = [
            ("==", Op::Equal),
            ("!=", Op::Unequal),
            ("<=", Op::LessEqual),
            (">=", Op::GreaterEqual),
            ("<", Op::Less),
            (">", Op::Greater),
            ("in", Op::In),
        ];
        let compared = self.chain(&signs, Self::sum, true)?;
        if let Kind::Binary(Op::Equal | Op::Unequal, left, right) = &compared.kind {
            if [left, right].iter().any(|side| side.kind == Kind::Null) {
                return Err("what is compared with null is null: write has(KEY)".into());
            }
        }
        Ok(compared)
    }

    fn sum(&mut self) -> Parsed<Node> {
        self.chain(&[("+", Op::Add), ("-", Op::Subtract)], Self::product, false)
    }

    fn product(&mut self) -> Parsed<Node> {
        let signs = [("*", Op::Multiply), ("//", Op::FloorDivide), ("/", Op::Divide), ("%", Op::Remainder)];
        self.chain(&signs, Self::atom, false)
    }

    fn name(&mut self) -> Parsed<String> {
        match *self.peek() {
            Token::Word(word) if !WORDS.contains(&word) => {
                self.at += 1;
                Ok(word.to_string())
            }
            _ => self.fail("a name"),
        }
    }

    fn atom(&mut self) -> Parsed<Node> {
        let start = self.tokens[self.at].1.start;
        let kind = match self.take() {
            Token::Int(n) => Kind::Int(n),
            Token::Text(text) => Kind::Text(text.to_string()),
            Token::Word("true") => Kind::Bool(true),
            Token::Word("false") => Kind::Bool(false),
            Token::Word("null") => Kind::Null,
            Token::Sign("(") => {
                let inner = self.expr()?;
                self.need(")")?;
                inner.kind
            }
            Token::Sign("[") => Kind::List(self.list()?),
            Token::Word(word @ ("has" | "int" | "len" | "stored")) => {
                self.need("(")?;
                let kind = self.call(word)?;
                self.need(")")?;
                kind
            }
            Token::Word(word) if !WORDS.contains(&word) => Kind::Name(word.to_string()),
            _ => {
                self.at = self.tokens.iter().position(|(_, span)| span.start == start).unwrap_or(self.at);
                return self.fail("a value");
            }
        };
        let mut node = self.node(start, kind);
        loop {
            if self.eat(".") {
                let name = self.name()?;
                node = self.node(start, Kind::Field(Box::new(node), name));
            } else if self.eat("[") {
                let item = self.expr()?;
                self.need("]")?;
                node = self.node(start, Kind::Item(Box::new(node), Box::new(item)));
            } else {
                return Ok(node);
            }
        }
    }

    fn list(&mut self) -> Parsed<Vec<Node>> {
        let mut items = Vec::new();
        if self.eat("]") {
            return Ok(items);
        }
        loop {
            items.push(self.expr()?);
            if self.eat("]") {
                return Ok(items);
            }
            self.need(",")?;
        }
    }

    fn call(&mut self, word: &str) -> Parsed<Kind> {
        match word {
            "has" => {
                let mut path = vec![self.name()?];
                while self.eat(".") {
                    path.push(self.name()?);
                }
                Ok(Kind::Has(path))
            }
            "int" => Ok(Kind::Int64(Box::new(self.expr()?))),
            "len" => Ok(Kind::Length(Box::new(self.expr()?))),
            _ => match self.take() {
                Token::Text(name) => Ok(Kind::Stored(Box::new(Pattern::parse(name)?))),
                _ => Err("stored() takes a tensor's name in quotes".into()),
            },
        }
    }
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn parse(text: &str) -> Result<Expression, String> {
        let fail = |e: String| format!("{text:?}: {e}");
        if text.len() > MAX_LENGTH {
            return Err(format!("an expression of {} bytes: at most {MAX_LENGTH}", text.len()));
        }
        let mut parser = Parser { text, tokens: tokens(text).map_err(fail)?, at: 0, depth: 0 };
        let root = parser.expr().map_err(fail)?;
        match parser.peek() {
            Token::End => Ok(Expression { text: text.to_string(), root }),
            _ => parser.fail("the end").map_err(fail),
        }
    }

    /// The text of a part.
    pub(super) fn text_of(&self, node: &Node) -> &str {
        &self.text[node.span.clone()]
    }

    /// The expression as it is written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Calls `visit` with each part, the outermost first.
    pub(super) fn visit<'a>(&'a self, visit: &mut dyn FnMut(&'a Node)) {
        fn walk<'a>(node: &'a Node, visit: &mut dyn FnMut(&'a Node)) {
            visit(node);
            match &node.kind {
                Kind::List(items) => items.iter().for_each(|item| walk(item, visit)),
                Kind::Field(inner, _) | Kind::Int64(inner) | Kind::Length(inner) | Kind::Not(inner) => {
                    walk(inner, visit)
                }
                Kind::Item(a, b) | Kind::Binary(_, a, b) => {
                    walk(a, visit);
                    walk(b, visit);
                }
                _ => {}
            }
        }
        walk(&self.root, visit);
    }

    /// How many parts lie within each other.
    pub(super) fn height(&self) -> usize {
        fn of(node: &Node) -> usize {
            1 + match &node.kind {
                Kind::List(items) => items.iter().map(of).max().unwrap_or(0),
                Kind::Field(inner, _) | Kind::Int64(inner) | Kind::Length(inner) | Kind::Not(inner) => {
                    of(inner)
                }
                Kind::Item(a, b) | Kind::Binary(_, a, b) => of(a).max(of(b)),
                _ => 0,
            }
        }
        of(&self.root)
    }

    /// Names that it refers to, keys of the config among them.
    pub(in crate::layout) fn names(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.visit(&mut |node| {
            if let Kind::Name(name) = &node.kind {
                names.push(name.as_str());
            }
        });
        names
    }

    /// True if it asks which tensors are stored.
    pub(super) fn asks_stored(&self) -> bool {
        let mut asks = false;
        self.visit(&mut |node| asks |= matches!(node.kind, Kind::Stored(_)));
        asks
    }

    /// The set that this is the rest of: `moe` in `not moe`.
    pub fn rest_of(&self) -> Option<&str> {
        match &self.root.kind {
            Kind::Not(inner) => match &inner.kind {
                Kind::Name(name) => Some(name),
                _ => None,
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The expression with all its brackets.
    fn shown(node: &Node) -> String {
        match &node.kind {
            Kind::Binary(op, a, b) => format!("({} {op:?} {})", shown(a), shown(b)),
            Kind::Not(a) => format!("(not {})", shown(a)),
            Kind::Name(name) => name.clone(),
            Kind::Int(n) => n.to_string(),
            Kind::Item(a, b) => format!("{}[{}]", shown(a), shown(b)),
            Kind::Field(a, b) => format!("{}.{b}", shown(a)),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn strengths_of_operators() {
        for (text, wanted) in [
            ("a ?? b / c", "(a Coalesce (b Divide c))"),
            ("a + b * c - d", "((a Add (b Multiply c)) Subtract d)"),
            ("a // b % c", "((a FloorDivide b) Remainder c)"),
            ("not a and b or c ?? d", "((((not a) And b) Or c) Coalesce d)"),
            ("not a == b", "(not (a Equal b))"),
            ("a.b[c + 1].d >= 2", "(a.b[(c Add 1)].d GreaterEqual 2)"),
            ("not not (a ?? b) in c", "(not (not ((a Coalesce b) In c)))"),
        ] {
            assert_eq!(shown(&Expression::parse(text).unwrap().root), wanted, "{text}");
        }
        let sum = Expression::parse("x * ( a + 1 ) ").unwrap();
        let Kind::Binary(_, _, right) = &sum.root.kind else { panic!() };
        assert_eq!(sum.text_of(right), "( a + 1 )");
    }

    #[test]
    fn refuses_what_is_no_expression() {
        let deep = format!("{}1{}", "(".repeat(20), ")".repeat(20));
        let long = "1+".repeat(300) + "1";
        let nots = "not ".repeat(20) + "a";
        for (text, wanted) in [
            ("", "expected a value"),
            ("a +", "expected a value"),
            ("a b", "expected the end before \"b\""),
            ("a == b == c", "expected the end"),
            ("(a", "expected ')'"),
            ("[1, ", "expected a value"),
            ("a.", "expected a name"),
            ("has(1)", "expected a name"),
            ("has(a", "expected ')'"),
            ("stored(a)", "in quotes"),
            ("stored('{L')", "no '}'"),
            ("'a", "no ' ends"),
            ("1.5", "expected a name"),
            ("99999999999999999999", "64 bits"),
            ("12ab", "64 bits"),
            ("a ? b", "expected the end"),
            ("a = b", "'=' is no part"),
            ("a; b", "';' is no part"),
            ("__import__('os')", "expected the end"),
            ("a == null", "has(KEY)"),
            ("in", "expected a value"),
            ("\u{e4} + 1", "is no part"),
            (&deep, "nested deeper"),
            (&nots, "nested deeper"),
            (&long, "601 bytes"),
        ] {
            let message = Expression::parse(text).unwrap_err();
            assert!(message.contains(wanted), "{text}: {wanted:?} not in {message}");
        }
    }

    proptest! {
        /// Whatever the text is, it is read or refused; and what is read has its parts where they stand.
        #[test]
        fn no_text_breaks_the_parser(text in "([a-c]|[0-9]{1,3}|'x'|true|null|not |and|or|in|has\\(|int\\(|len\\(|stored\\(|\\?\\?|==|<=|//|[-+*/%()\\[\\],.<> \u{e4}]){0,40}") {
            if let Ok(expression) = Expression::parse(&text) {
                expression.visit(&mut |node| assert!(!expression.text_of(node).is_empty()));
            }
        }
    }
}
