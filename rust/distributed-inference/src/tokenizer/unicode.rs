//! Classes of code points, as far as the pre-tokenizers ask: letters, numbers, white space, the rest.

use super::unicode_tables::{BOUNDARIES, NEWER_DIGITS};

/// What a pre-tokenizer sees of a character. Every character has exactly one class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// `[^\s\p{L}\p{N}]`
    Other,
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
    /// `\s`
    Space,
}

/// The class of a character.
pub(super) fn class(c: char) -> Class {
    let point = c as u32;
    match c {
        'a'..='z' | 'A'..='Z' => return Class::Letter,
        '0'..='9' => return Class::Number,
        '\t'..='\r' | ' ' => return Class::Space,
        // The CJK ideographs: one comparison instead of a search.
        '\u{4e00}'..='\u{9fff}' => return Class::Letter,
        _ if point < 0x80 => return Class::Other,
        _ => {}
    }
    // The largest entry of this code point is `point << 2 | 3`.
    let after = BOUNDARIES.partition_point(|entry| *entry <= point << 2 | 3);
    match BOUNDARIES.get(after.wrapping_sub(1)).map_or(0, |entry| entry & 3) {
        1 => Class::Letter,
        2 => Class::Number,
        3 => Class::Space,
        _ => Class::Other,
    }
}

/// Whether the digit splitter of `smollm` isolates the character.
pub(super) fn is_numeric(c: char) -> bool {
    class(c) == Class::Number
        || NEWER_DIGITS.iter().any(|(first, last)| (*first..=*last).contains(&(c as u32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_cuts_agree_with_the_table() {
        for point in (0..0x80u32).chain(0x4dff..0xa001) {
            let c = char::from_u32(point).unwrap();
            let after = BOUNDARIES.partition_point(|entry| *entry <= point << 2 | 3);
            assert_eq!(class(c) as u32, BOUNDARIES[after - 1] & 3, "U+{point:04X}");
        }
    }

    #[test]
    fn stretches_are_in_order_and_change_class() {
        assert_eq!(BOUNDARIES[0], 0);
        for pair in BOUNDARIES.windows(2) {
            assert!(pair[0] >> 2 < pair[1] >> 2);
            assert_ne!(pair[0] & 3, pair[1] & 3);
        }
    }

    #[test]
    fn known_characters_have_their_classes() {
        for (c, expected) in [
            ('é', Class::Letter),
            ('ſ', Class::Letter),
            ('歪', Class::Letter),
            ('\u{301}', Class::Other),
            ('½', Class::Number),
            ('௧', Class::Number),
            ('Ⅷ', Class::Number),
            ('\u{85}', Class::Space),
            ('\u{3000}', Class::Space),
            ('\u{200b}', Class::Other),
            ('\u{feff}', Class::Other),
            ('🚀', Class::Other),
            ('\u{10ffff}', Class::Other),
        ] {
            assert_eq!(class(c), expected, "{c:?}");
        }
        assert!(is_numeric('\u{11de0}') && class('\u{11de0}') == Class::Other);
    }
}
