//! Pre-tokenizers: hand-written matchers for the regular expressions of three families.
//!
//! | family | expression |
//! |---|---|
//! | `qwen2` | `(?i:'s\|'t\|'re\|'ve\|'m\|'ll\|'d)\|[^\r\n\p{L}\p{N}]?\p{L}+\|\p{N}\| ?[^\s\p{L}\p{N}]+[\r\n]*\|\s*[\r\n]+\|\s+(?!\S)\|\s+` |
//! | `llama-bpe` | the same with `\p{N}{1,3}` |
//! | `smollm` | every number by itself, then GPT-2's on each stretch between: `'s\|'t\|'re\|'ve\|'m\|'ll\|'d\| ?\p{L}+\| ?\p{N}+\| ?[^\s\p{L}\p{N}]+\|\s+(?!\S)\|\s+` |
//!
//! The alternatives cover every character, so the pieces are the text.

use super::unicode::{Class, class, is_numeric};

/// The families of pre-tokenizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreTokenizer {
    /// Qwen 2 and 2.5.
    Qwen2,
    /// SmolLM and SmolLM 2.
    SmolLm,
    /// Llama 3.
    LlamaBpe,
}

/// Calls `piece` with each piece of `text`, in order.
pub(super) fn split<'t>(pre: PreTokenizer, text: &'t str, mut piece: impl FnMut(&'t str)) {
    match pre {
        PreTokenizer::Qwen2 => each(text, |rest| modern(rest, 1), &mut piece),
        PreTokenizer::LlamaBpe => each(text, |rest| modern(rest, 3), &mut piece),
        PreTokenizer::SmolLm => {
            let mut rest = text;
            while let Some(first) = rest.chars().next() {
                let (head, tail) = if is_numeric(first) {
                    let (number, tail) = rest.split_at(first.len_utf8());
                    piece(number);
                    ("", tail)
                } else {
                    rest.split_at(run(rest, |c| !is_numeric(c)))
                };
                each(head, gpt2, &mut piece);
                rest = tail;
            }
        }
    }
}

/// Cuts `text` by `matcher`, which tells the bytes of the piece that a text starts with.
fn each<'t>(text: &'t str, matcher: impl Fn(&str) -> usize, piece: &mut impl FnMut(&'t str)) {
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        // A matcher that matched nothing would never end: one character at least.
        let (head, tail) = rest.split_at(matcher(rest).max(first.len_utf8()));
        piece(head);
        rest = tail;
    }
}

/// Bytes of the longest prefix whose characters all satisfy `wanted`.
fn run(text: &str, wanted: impl Fn(char) -> bool) -> usize {
    text.char_indices().find(|(_, c)| !wanted(*c)).map_or(text.len(), |(at, _)| at)
}

fn class_run(text: &str, wanted: Class) -> usize {
    run(text, |c| class(c) == wanted)
}

/// `'s|'t|'re|'ve|'m|'ll|'d`: bytes of the contraction that `text` starts with.
fn contraction(text: &str, any_case: bool) -> Option<usize> {
    let mut chars = text.strip_prefix('\'')?.chars();
    let mut next = || {
        chars.next().map(|c| match c {
            // Case folding takes the long s for an s.
            'ſ' if any_case => ('s', c.len_utf8()),
            'A'..='Z' if any_case => (c.to_ascii_lowercase(), 1),
            _ => (c, c.len_utf8()),
        })
    };
    let (first, length) = next()?;
    match first {
        's' | 't' | 'm' | 'd' => Some(1 + length),
        'r' | 'v' => next().filter(|(c, _)| *c == 'e').map(|_| 3),
        'l' => next().filter(|(c, _)| *c == 'l').map(|_| 3),
        _ => None,
    }
}

/// The expression of `qwen2` and `llama-bpe`; `digits` numbers at most make one piece.
fn modern(text: &str, digits: usize) -> usize {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return 0 };
    let kind = class(first);
    let after = chars.as_str();
    if first == '\''
        && let Some(length) = contraction(text, true)
    {
        return length;
    }
    if kind == Class::Letter {
        return class_run(text, Class::Letter);
    }
    if kind == Class::Number {
        return text
            .char_indices()
            .take(digits)
            .take_while(|(_, c)| class(*c) == Class::Number)
            .last()
            .map_or(0, |(at, c)| at + c.len_utf8());
    }
    if !matches!(first, '\r' | '\n') {
        let letters = class_run(after, Class::Letter);
        if letters > 0 {
            return first.len_utf8() + letters;
        }
    }
    let others = others(text, first, after);
    if others > 0 {
        return others + run(&text[others..], |c| matches!(c, '\r' | '\n'));
    }
    let spaces = class_run(text, Class::Space);
    match text[..spaces].rfind(['\r', '\n']) {
        Some(at) => at + 1,
        None => before_last_space(text, spaces),
    }
}

/// GPT-2's expression.
fn gpt2(text: &str) -> usize {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return 0 };
    let after = chars.as_str();
    if first == '\''
        && let Some(length) = contraction(text, false)
    {
        return length;
    }
    let skipped = usize::from(first == ' ');
    for kind in [Class::Letter, Class::Number] {
        let length = class_run(&text[skipped..], kind);
        if length > 0 {
            return skipped + length;
        }
    }
    match others(text, first, after) {
        0 => before_last_space(text, class_run(text, Class::Space)),
        length => length,
    }
}

/// ` ?[^\s\p{L}\p{N}]+`
fn others(text: &str, first: char, after: &str) -> usize {
    if first == ' ' {
        match class_run(after, Class::Other) {
            0 => 0,
            length => 1 + length,
        }
    } else {
        class_run(text, Class::Other)
    }
}

/// `\s+(?!\S)|\s+` on a text that starts with `spaces` bytes of white space: all of it at the text's
/// end; otherwise without its last character, which belongs to what follows, if it has another.
fn before_last_space(text: &str, spaces: usize) -> usize {
    if spaces == text.len() {
        return spaces;
    }
    match text[..spaces].char_indices().next_back() {
        Some((at, _)) if at > 0 => at,
        _ => spaces,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(pre: PreTokenizer, text: &str) -> Vec<&str> {
        let mut found = Vec::new();
        split(pre, text, |piece| found.push(piece));
        assert_eq!(found.concat(), text);
        found
    }

    #[test]
    fn qwen2_takes_numbers_one_by_one_and_llama_by_threes() {
        assert_eq!(pieces(PreTokenizer::Qwen2, "v1234"), ["v", "1", "2", "3", "4"]);
        assert_eq!(pieces(PreTokenizer::LlamaBpe, "v12345678"), ["v", "123", "456", "78"]);
    }

    #[test]
    fn a_line_end_stays_with_the_punctuation_before_it() {
        assert_eq!(pieces(PreTokenizer::Qwen2, "(x):\n  y"), ["(x", "):\n", " ", " y"]);
        assert_eq!(pieces(PreTokenizer::Qwen2, "a\r\n\r\n\t b"), ["a", "\r\n\r\n", "\t", " b"]);
    }

    #[test]
    fn the_last_space_of_a_run_goes_with_the_word() {
        assert_eq!(pieces(PreTokenizer::Qwen2, "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(pieces(PreTokenizer::SmolLm, "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(pieces(PreTokenizer::Qwen2, " \u{3000}b"), [" ", "\u{3000}b"]);
        assert_eq!(pieces(PreTokenizer::Qwen2, "\u{3000}1"), ["\u{3000}", "1"]);
    }

    #[test]
    fn contractions_fold_case_except_in_smollm() {
        assert_eq!(pieces(PreTokenizer::Qwen2, "I'LL'\u{17f}t's"), ["I", "'LL", "'\u{17f}", "t", "'s"]);
        assert_eq!(pieces(PreTokenizer::SmolLm, "I'LL we'll"), ["I", "'", "LL", " we", "'ll"]);
        assert_eq!(pieces(PreTokenizer::Qwen2, "'r'"), ["'r", "'"]);
    }

    #[test]
    fn smollm_ends_a_stretch_at_every_number() {
        assert_eq!(pieces(PreTokenizer::SmolLm, "a  12 b"), ["a", "  ", "1", "2", " b"]);
        assert_eq!(pieces(PreTokenizer::SmolLm, "!\u{11de0}!"), ["!", "\u{11de0}", "!"]);
        assert_eq!(pieces(PreTokenizer::Qwen2, "!\u{11de0}!"), ["!\u{11de0}!"]);
    }

    #[test]
    fn one_character_before_letters_joins_them_unless_it_ends_a_line() {
        assert_eq!(pieces(PreTokenizer::Qwen2, "\ta\nb(c"), ["\ta", "\n", "b", "(c"]);
    }
}
