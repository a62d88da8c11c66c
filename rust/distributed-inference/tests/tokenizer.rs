//! The tokenizer from outside: tiny vocabularies, and sections that are not to be trusted.

use distributed_inference::Kind;
use distributed_inference::tokenizer::{EncodeOptions, StreamDecoder, Tokenizer, Tokenizers};

const NORMAL: u8 = 1;
const CONTROL: u8 = 3;
const USER_DEFINED: u8 = 4;
const UNUSED: u8 = 5;
const NO_ID: u32 = u32::MAX;

/// A section in the making: 256 byte tokens, and what a test adds.
struct Parts {
    pre: u8,
    flags: u8,
    bos: u32,
    eos: u32,
    tokens: Vec<(Vec<u8>, u8)>,
    merges: Vec<[u32; 3]>,
}

impl Parts {
    fn new(pre: u8) -> Self {
        let tokens = (0..=255).map(|byte| (vec![byte], NORMAL)).collect();
        Self { pre, flags: 0, bos: NO_ID, eos: NO_ID, tokens, merges: Vec::new() }
    }

    fn token(&mut self, text: &str, kind: u8) -> u32 {
        self.tokens.push((text.as_bytes().to_vec(), kind));
        self.tokens.len() as u32 - 1
    }

    /// Adds the merge of two tokens, and their result if it is new.
    fn merge(&mut self, left: &str, right: &str) -> u32 {
        let id = |text: &str| self.tokens.iter().position(|token| token.0 == text.as_bytes());
        let (left_id, right_id) = (id(left).unwrap() as u32, id(right).unwrap() as u32);
        let text = format!("{left}{right}");
        let result = id(&text).map_or_else(|| self.token(&text, NORMAL), |id| id as u32);
        self.merges.push([left_id, right_id, result]);
        result
    }

    fn section(&self) -> Vec<u8> {
        let info = b"{}  ";
        let blob: usize = self.tokens.iter().map(|token| token.0.len()).sum();
        let mut bytes = b"KTOK\x01\x00".to_vec();
        bytes.extend([self.pre, self.flags]);
        for number in [info.len(), self.tokens.len(), self.merges.len(), blob] {
            bytes.extend((number as u32).to_le_bytes());
        }
        bytes.extend([self.bos, self.eos].iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(info);
        let mut end = 0u32;
        bytes.extend(end.to_le_bytes());
        for (text, _) in &self.tokens {
            end += text.len() as u32;
            bytes.extend(end.to_le_bytes());
        }
        bytes.extend(self.merges.iter().flatten().flat_map(|id| id.to_le_bytes()));
        bytes.extend(self.tokens.iter().map(|token| token.1));
        bytes.extend(self.tokens.iter().flat_map(|token| token.0.iter()));
        bytes
    }

    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::from_section(self.section()).unwrap()
    }
}

const PLAIN: EncodeOptions = EncodeOptions { allow_special: false, add_bos: None };
const SPECIAL: EncodeOptions = EncodeOptions { allow_special: true, add_bos: None };

#[test]
fn words_are_merged_within_their_pieces_only() {
    let mut parts = Parts::new(1);
    let ab = parts.merge("a", "b");
    let bang = parts.merge("b", "!");
    let tokenizer = parts.tokenizer();
    assert_eq!(tokenizer.encode("ab", PLAIN), [ab]);
    // "b" and "!" are in different pieces, so their merge never happens.
    assert_eq!(tokenizer.encode("b!", PLAIN), [u32::from(b'b'), u32::from(b'!')]);
    assert_eq!(tokenizer.decode(&[ab, bang]).unwrap(), b"abb!");
}

#[test]
fn control_tokens_are_text_unless_they_are_allowed() {
    let mut parts = Parts::new(1);
    let end = parts.token("<|end|>", CONTROL);
    let long = parts.token("<|end|>>", CONTROL);
    let tool = parts.token("<tool>", USER_DEFINED);
    let unused = parts.token("<pad>", UNUSED);
    let tokenizer = parts.tokenizer();
    assert_eq!(tokenizer.encode("<|end|>", SPECIAL), [end]);
    assert_eq!(tokenizer.encode("<|end|>>", SPECIAL), [long], "the longest wins");
    let text = tokenizer.encode("<|end|>", PLAIN);
    assert_eq!(text.len(), 7);
    assert_eq!(tokenizer.decode(&text).unwrap(), b"<|end|>");
    assert_eq!(tokenizer.encode("<tool>", PLAIN), [tool], "part of the vocabulary's own text");
    assert!(!tokenizer.encode("<pad>", SPECIAL).contains(&unused));
    assert_eq!(tokenizer.encode("<|end<|end|>x", SPECIAL)[5..], [end, u32::from(b'x')]);
}

#[test]
fn a_beginning_of_text_is_added_once() {
    let mut parts = Parts::new(3);
    parts.bos = parts.token("<s>", CONTROL);
    parts.flags = 2;
    let bos = parts.bos;
    let tokenizer = parts.tokenizer();
    assert_eq!(tokenizer.encode("a", PLAIN), [bos, 97]);
    assert_eq!(tokenizer.encode("<s>a", SPECIAL), [bos, 97]);
    assert_eq!(tokenizer.encode("", PLAIN), [bos]);
    assert_eq!(tokenizer.encode("a", EncodeOptions { add_bos: Some(false), ..PLAIN }), [97]);
    parts.flags = 0;
    let tokenizer = parts.tokenizer();
    assert_eq!(tokenizer.encode("a", PLAIN), [97]);
    assert_eq!(tokenizer.encode("a", EncodeOptions { add_bos: Some(true), ..PLAIN }), [bos, 97]);
}

#[test]
fn an_end_of_text_is_added_once_where_the_section_says_so() {
    let mut parts = Parts::new(1);
    parts.eos = parts.token("</s>", CONTROL);
    parts.flags = 4;
    let tokenizer = parts.tokenizer();
    assert_eq!(tokenizer.encode("a", PLAIN), [97, parts.eos]);
    assert_eq!(tokenizer.encode("a</s>", SPECIAL), [97, parts.eos]);
}

#[test]
fn whole_words_go_before_merging_where_the_family_does_so() {
    let mut parts = Parts::new(3);
    parts.merge("b", "c");
    let word = parts.token("abc", NORMAL);
    assert_eq!(parts.tokenizer().encode("abc", PLAIN), [97, 256]);
    parts.flags = 1;
    assert_eq!(parts.tokenizer().encode("abc", PLAIN), [word]);
}

#[test]
fn bytes_without_a_token_are_dropped_before_merging() {
    let mut parts = Parts::new(2);
    let dots = parts.merge(".", ".");
    parts.tokens[4] = (b"four".to_vec(), NORMAL);
    assert_eq!(parts.tokenizer().encode(".\u{4}.", PLAIN), [dots]);
}

#[test]
fn an_id_outside_the_vocabulary_is_an_error_that_names_it() {
    let error = Parts::new(1).tokenizer().decode(&[0, 256]).unwrap_err();
    assert_eq!(error.kind, Kind::BadArgument);
    assert!(error.message.contains("256"), "{error}");
}

#[test]
fn a_megabyte_of_one_character_is_encoded_and_comes_back() {
    let mut parts = Parts::new(1);
    for pair in ["a", "aa", "aaaa", " ", "  ", "    "] {
        parts.merge(pair, pair);
    }
    let tokenizer = parts.tokenizer();
    for character in ["a", " ", "\n", "!", "1", "é"] {
        let text = character.repeat(300_000 / character.len());
        let ids = tokenizer.encode(&text, PLAIN);
        assert_eq!(tokenizer.decode(&ids).unwrap(), text.as_bytes());
    }
    assert_eq!(tokenizer.encode(&"a".repeat(1_000_000), PLAIN).len(), 125_000);
}

fn sample() -> Parts {
    let mut parts = Parts::new(3);
    parts.flags = 3;
    parts.bos = parts.token("<s>", CONTROL);
    parts.merge("a", "b");
    parts.merge("ab", "ab");
    parts.token("<tool>", USER_DEFINED);
    parts
}

#[test]
fn a_section_cut_anywhere_is_refused() {
    let section = sample().section();
    for length in 0..section.len() {
        assert!(Tokenizer::from_section(&section[..length]).is_err(), "cut at {length}");
    }
    let mut longer = section;
    longer.push(0);
    assert_eq!(Tokenizer::from_section(longer).err().unwrap().kind, Kind::BadData);
}

#[test]
fn a_section_with_any_byte_changed_is_refused_or_works() {
    let section = sample().section();
    for at in 0..section.len() {
        for change in [1u8, 0x80, 0xff] {
            let mut changed = section.clone();
            changed[at] ^= change;
            if let Ok(tokenizer) = Tokenizer::from_section(changed) {
                let ids = tokenizer.encode("<s>abab <tool> it's 123\n", SPECIAL);
                assert!(tokenizer.decode(&ids).is_ok());
            }
        }
    }
}

#[test]
fn a_section_that_contradicts_itself_is_refused_by_name() {
    let refuse = |change: fn(&mut Parts), words: &str| {
        let mut parts = sample();
        change(&mut parts);
        let error = Tokenizer::from_section(parts.section()).err().unwrap();
        assert!(error.message.contains(words), "{error}");
    };
    refuse(|parts| parts.bos = 9999, "bos is token 9999");
    refuse(|parts| parts.bos = NO_ID, "the section names none");
    refuse(|parts| parts.pre = 9, "pre-tokenizer 9");
    refuse(|parts| parts.flags = 8, "flags");
    refuse(|parts| parts.merges[1] = [97, 98, 99], "token 99 is not token 97");
    refuse(|parts| parts.merges[1] = [97, 98, 77_777], "77777");
    refuse(|parts| parts.merges.push(parts.merges[0]), "is there already");
    refuse(|parts| parts.tokens[5].0.clear(), "token 5 is bytes");
    refuse(|parts| parts.tokens[5].0 = vec![b'x'; 20_000], "token 5 is bytes");
    refuse(|parts| parts.tokens[5].1 = 6, "type 6");
    refuse(|parts| parts.tokens[5].0 = vec![97], "both the byte");
    refuse(|parts| _ = parts.token("<tool>", CONTROL), "the same text");
    refuse(|parts| _ = parts.token("abab", NORMAL), "duplicate");
    refuse(|parts| parts.tokens.push((vec![0xff, 0xfe], CONTROL)), "not valid UTF-8");
    refuse(|parts| parts.tokens.clear(), "0 tokens");
}

#[test]
fn a_host_holds_tokenizers_and_streams_by_number() {
    let section = sample().section();
    let mut held = Tokenizers::default();
    let number = held.create(section.len()).unwrap();
    held.append(number, &section[..100]).unwrap();
    assert!(held.get(number).is_err(), "its section has not arrived");
    assert_eq!(held.append(number, &section).unwrap_err().kind, Kind::BadArgument);
    held.append(number, &section[100..]).unwrap();
    assert_eq!(held.open(number).unwrap(), 260);
    assert_eq!(held.open(number).unwrap_err().kind, Kind::BadState);
    held.text(number, b"ab").unwrap();
    held.text(number, b"ab").unwrap();
    assert_eq!(held.encode(number, PLAIN).unwrap(), 2);
    assert_eq!(held.ids(number).unwrap(), [256, 258]);
    held.text(number, b"\xff").unwrap();
    assert_eq!(held.encode(number, PLAIN).unwrap_err().kind, Kind::BadArgument);
    let stream = held.stream(number).unwrap();
    assert_eq!(held.push(stream, 0xe2).unwrap(), "");
    assert_eq!(held.push(stream, 999).unwrap_err().kind, Kind::BadArgument);
    assert_eq!(held.push(stream, 0x82).unwrap(), "");
    assert_eq!(held.push(stream, 0xac).unwrap(), "€");
    assert_eq!(held.finish(stream).unwrap(), "");
    assert_eq!(held.finish(stream).unwrap_err().kind, Kind::BadState);
    let stream = held.stream(number).unwrap();
    held.destroy(number).unwrap();
    assert_eq!(held.push(stream, 97).unwrap_err().kind, Kind::BadState);
    assert_eq!(held.destroy(number).unwrap_err().kind, Kind::BadState);
}

#[test]
fn a_section_that_cannot_be_opened_frees_its_number() {
    let mut held = Tokenizers::default();
    let number = held.create(4).unwrap();
    assert_eq!(held.open(number).unwrap_err().kind, Kind::BadData, "it has not arrived");
    assert_eq!(held.create(4).unwrap(), number);
    assert!(held.create(usize::MAX).is_err());
}

#[test]
fn a_stream_of_tokens_is_the_text_of_all_of_them() {
    let tokenizer = Parts::new(1).tokenizer();
    let ids: Vec<u32> = "naïve 🚀 歪\u{301}".bytes().map(u32::from).collect();
    let (mut decoder, mut text) = (StreamDecoder::default(), String::new());
    for id in &ids {
        decoder.push(tokenizer.token_bytes(*id).unwrap(), &mut text);
        assert!(!text.contains('\u{fffd}'));
    }
    assert_eq!(decoder.held(), 0);
    decoder.finish(&mut text);
    assert_eq!(text, "naïve 🚀 歪\u{301}");
}
