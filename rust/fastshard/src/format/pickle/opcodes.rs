//! Decoding of opcodes and their arguments.

use super::Machine;
use crate::error::Result;
use crate::value::Value;

/// Protocols that exist.
const MAX_PROTOCOL: u8 = 5;

/// Names as in CPython's `pickletools.py`.
const NAMES: &[(u8, &str)] = &[
    (b'(', "MARK"),
    (b'.', "STOP"),
    (b'0', "POP"),
    (b'1', "POP_MARK"),
    (b'2', "DUP"),
    (b'F', "FLOAT"),
    (b'I', "INT"),
    (b'J', "BININT"),
    (b'K', "BININT1"),
    (b'L', "LONG"),
    (b'M', "BININT2"),
    (b'N', "NONE"),
    (b'P', "PERSID"),
    (b'Q', "BINPERSID"),
    (b'R', "REDUCE"),
    (b'S', "STRING"),
    (b'T', "BINSTRING"),
    (b'U', "SHORT_BINSTRING"),
    (b'V', "UNICODE"),
    (b'X', "BINUNICODE"),
    (b'a', "APPEND"),
    (b'b', "BUILD"),
    (b'c', "GLOBAL"),
    (b'd', "DICT"),
    (b'}', "EMPTY_DICT"),
    (b'e', "APPENDS"),
    (b'g', "GET"),
    (b'h', "BINGET"),
    (b'i', "INST"),
    (b'j', "LONG_BINGET"),
    (b'l', "LIST"),
    (b']', "EMPTY_LIST"),
    (b'o', "OBJ"),
    (b'p', "PUT"),
    (b'q', "BINPUT"),
    (b'r', "LONG_BINPUT"),
    (b's', "SETITEM"),
    (b't', "TUPLE"),
    (b')', "EMPTY_TUPLE"),
    (b'u', "SETITEMS"),
    (b'G', "BINFLOAT"),
    (b'B', "BINBYTES"),
    (b'C', "SHORT_BINBYTES"),
    (0x80, "PROTO"),
    (0x81, "NEWOBJ"),
    (0x82, "EXT1"),
    (0x83, "EXT2"),
    (0x84, "EXT4"),
    (0x85, "TUPLE1"),
    (0x86, "TUPLE2"),
    (0x87, "TUPLE3"),
    (0x88, "NEWTRUE"),
    (0x89, "NEWFALSE"),
    (0x8a, "LONG1"),
    (0x8b, "LONG4"),
    (0x8c, "SHORT_BINUNICODE"),
    (0x8d, "BINUNICODE8"),
    (0x8e, "BINBYTES8"),
    (0x8f, "EMPTY_SET"),
    (0x90, "ADDITEMS"),
    (0x91, "FROZENSET"),
    (0x92, "NEWOBJ_EX"),
    (0x93, "STACK_GLOBAL"),
    (0x94, "MEMOIZE"),
    (0x95, "FRAME"),
    (0x96, "BYTEARRAY8"),
    (0x97, "NEXT_BUFFER"),
    (0x98, "READONLY_BUFFER"),
];

/// The opcode's name, or its number where there is none.
pub(super) fn name(op: u8) -> String {
    NAMES.iter().find(|row| row.0 == op).map_or(format!("0x{op:02x}"), |row| row.1.into())
}

impl Machine<'_> {
    /// Interprets the whole stream and sets the root.
    pub(super) fn run(&mut self) -> Result<()> {
        loop {
            self.op_at = self.at;
            [self.op] = self.array()?;
            if self.op == b'.' {
                break;
            }
            self.step()?;
            self.note_number();
        }
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.refuse("objects are left on the stack"));
        }
        self.values.set_root(root);
        Ok(())
    }

    /// Notes where the number lies that the opcode pushed.
    fn note_number(&mut self) {
        // Bytes of the opcode before those of the number: after a length of one or four bytes it is an integer of that many.
        let head = match self.op {
            b'K' | b'M' | b'J' | b'G' => 1,
            0x8a => 2,
            0x8b => 5,
            _ => return,
        };
        if let (Some(numbers), Some(&node)) = (&mut self.numbers, self.stack.last()) {
            numbers.insert(node, self.op_at + head..self.at);
        }
    }

    fn step(&mut self) -> Result<()> {
        match self.op {
            0x80 => match self.array()? {
                [version] if version > MAX_PROTOCOL => Err(self.unsupported(format!("protocol {version}"))),
                _ => Ok(()),
            },
            0x95 => {
                let len = self.len8()?;
                let at = self.at;
                self.take(len)?;
                self.at = at;
                Ok(())
            }

            b'(' => {
                self.limit("marks open", self.marks.len() + 1, self.limits.depth)?;
                self.marks.push(self.stack.len());
                Ok(())
            }
            b'0' if self.height() == 0 && !self.marks.is_empty() => self.pop_mark().map(drop),
            b'0' => self.pop().map(drop),
            b'1' => self.pop_mark().map(drop),
            b'2' => self.top().and_then(|node| self.push(node)),

            b'g' => self.decimal_index().and_then(|i| self.memo_get(i)),
            b'h' => self.array::<1>().and_then(|[i]| self.memo_get(i.into())),
            b'j' => self.len4().and_then(|i| self.memo_get(i as usize)),
            b'p' => self.decimal_index().and_then(|i| self.memo_put(i)),
            b'q' => self.array::<1>().and_then(|[i]| self.memo_put(i.into())),
            b'r' => self.len4().and_then(|i| self.memo_put(i as usize)),
            // Index = objects remembered so far. Writers of MEMOIZE leave no gaps.
            0x94 => self.memo_put(self.memo.len()),

            b'N' => self.push_value(Value::None),
            0x88 => self.push_value(Value::Bool(true)),
            0x89 => self.push_value(Value::Bool(false)),
            b'K' => self.array::<1>().and_then(|[i]| self.push_value(Value::Int(i.into()))),
            b'M' => self.array().and_then(|b| self.push_value(Value::Int(u16::from_le_bytes(b).into()))),
            b'J' => self.array().and_then(|b| self.push_value(Value::Int(i32::from_le_bytes(b).into()))),
            b'I' | b'L' => self.decimal(),
            0x8a => self.array::<1>().and_then(|[len]| self.long(len.into())),
            0x8b => self.len4().and_then(|len| self.long(len)),
            b'G' => self.array().and_then(|b| self.push_value(Value::Float(f64::from_be_bytes(b)))),
            b'F' => {
                let line = self.line()?;
                let text = std::str::from_utf8(line).unwrap_or("").trim();
                let number = text.parse().map_err(|_| self.refuse("not a number"))?;
                self.push_value(Value::Float(number))
            }

            b'X' => self.len4().and_then(|len| self.string(len)),
            0x8c => self.array::<1>().and_then(|[len]| self.string(len.into())),
            0x8d => self.len8().and_then(|len| self.string(len)),
            b'V' => {
                let line = self.line()?;
                let text = self.raw_unicode(line)?;
                self.push_value(Value::Str(text))
            }
            b'S' => {
                let line = self.line()?;
                let bytes = self.quoted(line)?;
                self.push_value(python2(bytes))
            }
            b'T' => {
                let len = self.len4()?;
                let bytes = self.take(len)?.to_vec();
                self.push_value(python2(bytes))
            }
            b'U' => {
                let [len] = self.array()?;
                let bytes = self.take(len.into())?.to_vec();
                self.push_value(python2(bytes))
            }
            b'B' => self.len4().and_then(|len| self.byte_string(len)),
            b'C' => self.array::<1>().and_then(|[len]| self.byte_string(len.into())),
            0x8e | 0x96 => self.len8().and_then(|len| self.byte_string(len)),

            b')' => self.push_value(Value::Tuple(Vec::new())),
            b't' => self.pop_mark().and_then(|items| self.push_value(Value::Tuple(items))),
            0x85..=0x87 => {
                let count = usize::from(self.op - 0x84);
                if self.height() < count {
                    return Err(self.refuse("too little is on the stack"));
                }
                let items = self.stack.split_off(self.stack.len() - count);
                self.push_value(Value::Tuple(items))
            }
            b']' => self.push_value(Value::List(Vec::new())),
            b'l' => self.pop_mark().and_then(|items| self.push_value(Value::List(items))),
            b'}' => self.push_value(Value::Dict(Vec::new())),
            b'd' => {
                let items = self.pop_mark()?;
                self.push_value(Value::Dict(Vec::new()))?;
                let dict = self.top()?;
                self.set_items(dict, &items)
            }
            0x8f => self.push_value(Value::Set(Vec::new())),
            0x91 => self.pop_mark().and_then(|items| self.push_value(Value::Set(items))),
            b'a' => {
                let item = self.pop()?;
                let target = self.top()?;
                self.append(target, &[item])
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                let target = self.top()?;
                self.append(target, &items)
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                let target = self.top()?;
                self.set_items(target, &[key, value])
            }
            b'u' => {
                let items = self.pop_mark()?;
                let target = self.top()?;
                self.set_items(target, &items)
            }

            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                let name = format!("{}.{}", self.text(module)?, self.text(name)?);
                self.push_value(Value::Global(name))
            }
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let (Value::Str(module), Value::Str(name)) = (self.values.get(module), self.values.get(name))
                else {
                    return Err(self.refuse("a global whose name is not a string"));
                };
                let name = format!("{module}.{name}");
                self.derive(name.len())?;
                self.push_value(Value::Global(name))
            }
            b'R' | 0x81 => {
                let (args, class) = (self.pop()?, self.pop()?);
                self.call(class, args)
            }
            0x92 => {
                let (keywords, args, class) = (self.pop()?, self.pop()?, self.pop()?);
                let args = match self.values.get(keywords) {
                    Value::Dict(items) if items.is_empty() => args,
                    _ => self.make(Value::Tuple(vec![args, keywords]))?,
                };
                self.call(class, args)
            }
            b'i' => {
                let (module, name) = (self.line()?, self.line()?);
                let name = format!("{}.{}", self.text(module)?, self.text(name)?);
                let args = self.pop_mark()?;
                let class = self.make(Value::Global(name))?;
                let args = self.make(Value::Tuple(args))?;
                self.call(class, args)
            }
            b'o' => {
                let mut args = self.pop_mark()?;
                if args.is_empty() {
                    return Err(self.refuse("no class above the mark"));
                }
                let class = args.remove(0);
                let args = self.make(Value::Tuple(args))?;
                self.call(class, args)
            }
            b'b' => {
                let state = self.pop()?;
                let target = self.top()?;
                self.build(target, state)
            }
            b'Q' => self.pop().and_then(|id| self.persistent(id)),
            b'P' => {
                let line = self.line()?;
                let id = self.text(line)?;
                let id = self.make(Value::Str(id))?;
                self.persistent(id)
            }

            0x82..=0x84 => Err(self.unsupported("a name from Python's extension registry")),
            0x97 | 0x98 => Err(self.unsupported("a buffer kept outside the stream")),
            _ => Err(self.refuse("no such opcode")),
        }
    }

    fn len4(&mut self) -> Result<u64> {
        Ok(u32::from_le_bytes(self.array()?).into())
    }

    fn len8(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self, len: u64) -> Result<()> {
        let bytes = self.take(len)?;
        let text = self.text(bytes)?;
        self.push_value(Value::Str(text))
    }

    fn byte_string(&mut self, len: u64) -> Result<()> {
        let bytes = self.take(len)?.to_vec();
        self.push_value(Value::Bytes(bytes))
    }

    /// A little-endian two's complement integer of `len` bytes.
    fn long(&mut self, len: u64) -> Result<()> {
        self.limit("bytes of an integer", usize::try_from(len).unwrap_or(usize::MAX), self.limits.long)?;
        let bytes = self.take(len)?;
        self.push_value(integer(bytes))
    }

    /// A line with a decimal integer; `I` also spells booleans (`00`, `01`), `L` may end in `L`.
    fn decimal(&mut self) -> Result<()> {
        let line = self.line()?;
        let text = std::str::from_utf8(line).unwrap_or("");
        if self.op == b'I' && (text == "00" || text == "01") {
            return self.push_value(Value::Bool(text == "01"));
        }
        let number: i128 = text
            .trim()
            .trim_end_matches('L')
            .parse()
            .map_err(|_| self.refuse("not an integer below 2^127"))?;
        self.push_value(integer(&number.to_le_bytes()))
    }

    fn decimal_index(&mut self) -> Result<usize> {
        let line = self.line()?;
        let index = std::str::from_utf8(line).ok().and_then(|text| text.trim().parse().ok());
        index.ok_or_else(|| self.refuse("not an index into the memo"))
    }

    /// Python's raw-unicode-escape: Latin-1 with `\uXXXX` and `\UXXXXXXXX`.
    fn raw_unicode(&self, line: &[u8]) -> Result<String> {
        let mut text = String::with_capacity(line.len());
        let mut i = 0;
        while i < line.len() {
            let digits = match (line[i], line.get(i + 1)) {
                (b'\\', Some(b'u')) => 4,
                (b'\\', Some(b'U')) => 8,
                _ => {
                    text.push(char::from(line[i]));
                    i += 1;
                    continue;
                }
            };
            let code = line
                .get(i + 2..i + 2 + digits)
                .and_then(|hex| std::str::from_utf8(hex).ok())
                .and_then(|hex| u32::from_str_radix(hex, 16).ok())
                .and_then(char::from_u32);
            text.push(code.ok_or_else(|| self.refuse("an escape that is no character"))?);
            i += 2 + digits;
        }
        Ok(text)
    }

    /// A string in quotes with the escapes that Python 2's `repr` writes.
    fn quoted(&self, line: &[u8]) -> Result<Vec<u8>> {
        let inner = match line {
            [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] => inner,
            _ => return Err(self.refuse("a string without quotes")),
        };
        let mut bytes = Vec::with_capacity(inner.len());
        let mut rest = inner;
        while let [first, tail @ ..] = rest {
            rest = tail;
            if *first != b'\\' {
                bytes.push(*first);
                continue;
            }
            let [escape, tail @ ..] = rest else { return Err(self.refuse("an escape without end")) };
            rest = tail;
            bytes.push(match escape {
                b'\\' | b'\'' | b'"' => *escape,
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'x' => {
                    let digits = rest.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
                    rest = rest.get(2..).unwrap_or(&[]);
                    digits
                        .and_then(|hex| u8::from_str_radix(hex, 16).ok())
                        .ok_or_else(|| self.refuse("an escape that is no byte"))?
                }
                _ => return Err(self.refuse("an escape that Python does not write")),
            });
        }
        Ok(bytes)
    }
}

/// An integer from little-endian two's complement bytes, in as few as hold it; none stand for 0.
fn integer(mut bytes: &[u8]) -> Value {
    let sign = |b: u8| if b & 0x80 == 0 { 0 } else { 0xff };
    while let [rest @ .., before, last] = bytes {
        if *last != sign(*before) {
            break;
        }
        bytes = &bytes[..=rest.len()];
    }
    if bytes.len() > 8 {
        return Value::BigInt(bytes.to_vec());
    }
    let mut all = [bytes.last().map_or(0, |&b| sign(b)); 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(all))
}

/// A Python 2 `str`: text where it is UTF-8 (as torch decodes it), else bytes.
fn python2(bytes: Vec<u8>) -> Value {
    String::from_utf8(bytes).map_or_else(|e| Value::Bytes(e.into_bytes()), Value::Str)
}
