//! ggml's block formats, one file each: how many elements and bytes a block has, and what they mean.
//!
//! Every format turns blocks into `f32` with the operations, and in the order, of ggml's own reference,
//! so the values are bit-identical to it. Those whose elements are integers with a scale ([`Codes`]) say so too, once in
//! plain code and once in the instructions of each host; products take them as integers.

mod float;
#[cfg(target_arch = "aarch64")]
mod neon;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod table;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::kernels::coded::Coded;
use crate::{Result, fail};
#[cfg(target_arch = "aarch64")]
use neon as simd;
#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
pub use simd::Pair;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use wasm as simd;

/// A block format, as its file states it.
pub trait Block {
    /// ggml's type id.
    const ID: u32;
    /// ggml's name.
    const NAME: &'static str;
    /// Elements in a block.
    const ELEMENTS: usize;
    /// Bytes of a block.
    const BYTES: usize;

    /// Writes the `ELEMENTS` values of a block of `BYTES` bytes.
    fn dequantise(block: &[u8], out: &mut [f32]);
}

/// What the scales of a block's units are made of, beside its half-precision numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subs {
    /// Nothing: the block is one unit.
    None,
    /// Eight unsigned scales and minimums of six bits, behind both numbers; see [`scales_and_mins`].
    ScalesAndMins,
    /// Sixteen signed scales `at` bytes into the block, and a half-precision number `d` bytes into it.
    Scales {
        /// Where the scales are.
        at: usize,
        /// Where what they are multiplied by is.
        d: usize,
    },
}

/// A block format whose elements are unsigned integers with a scale for each unit of 16 or 32 elements:
/// `scale · (code − OFFSET)`, or `scale · code − minimum`.
pub trait Codes: Block {
    /// Elements that share a scale: 16 or 32.
    const UNIT: usize = 32;
    /// What is subtracted from codes; 0 where there are minimums.
    const OFFSET: i32 = 0;
    /// Whether there are minimums.
    const MINS: bool = false;
    /// The largest code.
    const LARGEST: u32;
    /// What scales are made of.
    const SUBS: Subs = Subs::None;

    /// The block's scale and minimum; without [`Subs`] the minimum is stored negated.
    fn halves(block: &[u8]) -> [u16; 2];
    /// Sixteen scales, or eight scales and eight minimums, as [`Codes::SUBS`] says.
    #[inline(always)]
    fn subs(_block: &[u8]) -> [u8; 16] {
        [0; 16]
    }
    /// Writes the codes.
    fn codes(block: &[u8], out: &mut [u8]);

    /// Gives the codes to `take`, 32 at a time in two vectors of sixteen, with the number of the 32.
    ///
    /// # Safety
    /// `block` has [`Block::BYTES`] bytes.
    #[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
    unsafe fn pairs(k: &simd::Constants, block: *const u8, take: impl FnMut(usize, Pair));

    /// Gives the codes to `take`, 32 at a time, with the number of the 32.
    ///
    /// # Safety
    /// `block` has [`Block::BYTES`] bytes, and the processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn pairs(block: *const u8, take: impl FnMut(usize, core::arch::x86_64::__m256i));
}

/// A block format as the kernels use it.
pub struct Format {
    /// ggml's type id.
    pub id: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Elements in a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    values: fn(&[u8], &mut [f32]),
    coded: Option<Coded>,
}

impl Format {
    const fn of<B: Block>() -> Self {
        Self {
            id: B::ID,
            name: B::NAME,
            elements: B::ELEMENTS,
            bytes: B::BYTES,
            values: blocks::<B>,
            coded: None,
        }
    }

    /// A format that has integer kernels.
    const fn coded<B: Codes>() -> Self {
        Self { coded: Some(Coded::of::<B>()), ..Self::of::<B>() }
    }

    /// The format of a ggml type id, or an error that names the type.
    pub fn of_type(id: u32) -> Result<&'static Format> {
        if let Some(format) = FORMATS.iter().find(|format| format.id == id) {
            return Ok(format);
        }
        let name =
            OTHER_NAMES.iter().find(|(other, _)| *other == id).map_or("an unknown type", |(_, name)| name);
        let known: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
        fail!(Unsupported, "{name} (ggml type {id}) has no kernel; those that have are {}", known.join(", "))
    }

    /// Bytes of a row of `cols` elements, or an error unless it is a whole number of blocks.
    pub fn row_bytes(&self, cols: usize) -> Result<usize> {
        if cols == 0 || !cols.is_multiple_of(self.elements) {
            fail!(
                BadArgument,
                "a {} row must be a multiple of {} elements, but has {cols}",
                self.name,
                self.elements
            );
        }
        match (cols / self.elements).checked_mul(self.bytes) {
            Some(bytes) => Ok(bytes),
            None => fail!(BadArgument, "a {} row of {cols} elements is too long", self.name),
        }
    }

    /// The format's integer kernels.
    pub fn integers(&self) -> Option<&Coded> {
        self.coded.as_ref()
    }

    /// Turns blocks into values: `out` has `elements` for every `bytes` of `blocks`.
    pub fn dequantise(&self, blocks: &[u8], out: &mut [f32]) {
        debug_assert_eq!(blocks.len() / self.bytes, out.len() / self.elements);
        (self.values)(blocks, out);
    }
}

fn blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    for (block, values) in bytes.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::ELEMENTS)) {
        B::dequantise(block, values);
    }
}

static FORMATS: [Format; 16] = [
    Format::of::<float::F32>(),
    Format::of::<float::F16>(),
    Format::of::<float::Bf16>(),
    Format::coded::<q4_0::Q4_0>(),
    Format::coded::<q4_1::Q4_1>(),
    Format::coded::<q5_0::Q5_0>(),
    Format::coded::<q5_1::Q5_1>(),
    Format::coded::<q8_0::Q8_0>(),
    Format::of::<q2_k::Q2K>(),
    Format::of::<q3_k::Q3K>(),
    Format::coded::<q4_k::Q4K>(),
    Format::coded::<q5_k::Q5K>(),
    Format::coded::<q6_k::Q6K>(),
    Format::of::<table::Iq4Nl>(),
    Format::of::<table::Iq4Xs>(),
    Format::of::<table::Mxfp4>(),
];

/// ggml's other types, so that an error can say which one a file has.
const OTHER_NAMES: [(u32, &str); 13] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (40, "NVFP4"),
];

/// The half-precision number at `at`, exactly.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    from_half(half_bits(block, at))
}

/// The bits of the half-precision number at `at`.
#[inline(always)]
fn half_bits(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Codes of four bits: the low nibbles of sixteen bytes are elements 0..16, the high ones 16..32.
#[inline(always)]
fn nibbles(bytes: &[u8], out: &mut [u8]) {
    for (i, byte) in bytes.iter().enumerate() {
        (out[i], out[i + 16]) = (byte & 15, byte >> 4);
    }
}

/// Codes of five bits: [`nibbles`], and bit i of the 32 bits `fifth` on top of element i.
#[inline(always)]
fn five_bits(fifth: &[u8], bytes: &[u8], out: &mut [u8]) {
    nibbles(bytes, out);
    for (i, code) in out.iter_mut().enumerate() {
        *code |= (fifth[i / 8] >> (i % 8) & 1) << 4;
    }
}

/// The value of a half-precision number, exactly.
#[inline(always)]
pub fn from_half(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let (sign, magnitude) = (bits >> 15 << 31, bits & 0x7FFF);
    // Subnormal scales are common in real models. Made by way of an integer, they are normal numbers here all the
    // way; an operand that is subnormal in f32 would cost a hundred cycles.
    let value = match magnitude >> 10 {
        0 => (magnitude as f32 * (1.0 / 16_777_216.0)).to_bits(),
        31 => magnitude << 13 | 0x7F80_0000,
        _ => (magnitude << 13) + (112 << 23),
    };
    f32::from_bits(value | sign)
}

/// The nearest half-precision number, ties to even; infinite beyond the largest.
#[inline(always)]
pub fn to_half(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, magnitude) = ((bits >> 16 & 0x8000) as u16, bits & 0x7FFF_FFFF);
    let rounded = match magnitude {
        0x7F80_0001.. => 0x7E00,
        0x4780_0000.. => 0x7C00,
        // Normal: 13 bits are rounded off; a carry goes into the exponent, as it should.
        0x3880_0000.. => (magnitude + 0x0FFF + (magnitude >> 13 & 1) - (112 << 23)) >> 13,
        // Subnormal: adding a half brings the bits that stay to the end of the fraction, rounded.
        _ => (f32::from_bits(magnitude) + 0.5).to_bits() - 0x3F00_0000,
    };
    sign | rounded.min(0x7E00) as u16
}

/// Scales and minimums of the eight sub-blocks in the 12 bytes that `Q4_K` and `Q5_K` share: six bits each,
/// the scales in the first eight bytes of the answer and the minimums in the last.
///
/// Sub-blocks 0 to 3 have their six bits in one byte. The upper two bits of those bytes belong to
/// sub-blocks 4 to 7, whose lower four lie in the last four bytes. Four of them are taken at once.
#[inline(always)]
fn scales_and_mins(packed: &[u8]) -> [u8; 16] {
    let four = |at: usize| u32::from_le_bytes([packed[at], packed[at + 1], packed[at + 2], packed[at + 3]]);
    let (scales, mins, rest) = (four(0), four(4), four(8));
    let (low_six, low_four, high_two) = (0x3F3F_3F3F, 0x0F0F_0F0F, 0x0303_0303);
    let words = [
        scales & low_six,
        rest & low_four | (scales >> 6 & high_two) << 4,
        mins & low_six,
        rest >> 4 & low_four | (mins >> 6 & high_two) << 4,
    ];
    bytemuck::cast(words.map(u32::to_le))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_of_the_upper_sub_blocks_are_gathered_from_two_places() {
        let mut packed = [0u8; 12];
        // Sub-block 6: scale 0b11_0010 = 50, minimum 0b00_1001 = 9.
        packed[2] = 0b11 << 6;
        packed[6] = 0b00 << 6;
        packed[10] = 9 << 4 | 0b0010;
        let of = |packed: &[u8], sub: usize| (scales_and_mins(packed)[sub], scales_and_mins(packed)[sub + 8]);
        assert_eq!(of(&packed, 6), (50, 9));
        // Sub-block 2 has kept its own bits.
        packed[2] |= 3;
        packed[6] |= 38;
        assert_eq!(of(&packed, 2), (3, 38));
        assert_eq!(of(&packed, 6), (50, 9));
    }

    #[test]
    fn half_precision_numbers_are_read_exactly() {
        let value = |bits: u16| half(&bits.to_le_bytes(), 0);
        assert_eq!(value(0x0001), 2f32.powi(-24));
        assert_eq!(value(0x83FF), -1023.0 * 2f32.powi(-24));
        assert_eq!(value(0x0400), 2f32.powi(-14));
        assert_eq!(value(0x3C01), 1.0 + 2f32.powi(-10));
        assert_eq!(value(0xFBFF), -65504.0);
        assert_eq!((value(0x7C00), value(0xFC00)), (f32::INFINITY, f32::NEG_INFINITY));
        assert!(value(0x7C01).is_nan() && value(0xFE00).is_nan());
        assert!(value(0x8000).is_sign_negative() && value(0x8000) == 0.0);
    }

    #[test]
    fn every_half_precision_number_survives_and_what_lies_between_goes_to_the_nearest() {
        for bits in 0..=0x7C00u16 {
            let value = from_half(bits);
            assert_eq!(to_half(value), bits);
            assert_eq!(to_half(-value), bits | 0x8000);
            if bits < 0x7BFF {
                let middle = (value + from_half(bits + 1)) / 2.0;
                assert_eq!(to_half(middle), bits + bits % 2, "ties to even");
                assert_eq!(to_half(f32::from_bits(middle.to_bits() - 1)), bits);
                assert_eq!(to_half(f32::from_bits(middle.to_bits() + 1)), bits + 1);
            }
        }
        assert_eq!((to_half(65519.9), to_half(65520.0), to_half(1e30)), (0x7BFF, 0x7C00, 0x7C00));
        assert_eq!((to_half(f32::NAN), to_half(1e-30)), (0x7E00, 0));
    }

    #[test]
    fn a_type_without_a_kernel_is_named() {
        assert!(Format::of_type(19).err().unwrap().message.starts_with("IQ1_S (ggml type 19)"));
        assert!(Format::of_type(999).err().unwrap().message.contains("999"));
    }

    #[test]
    fn a_row_is_a_whole_number_of_blocks() {
        let q4_k = Format::of_type(12).unwrap();
        assert_eq!(q4_k.row_bytes(512).unwrap(), 288);
        assert!(q4_k.row_bytes(172).is_err() && q4_k.row_bytes(0).is_err());
    }

    #[test]
    fn no_two_formats_share_an_id_or_name() {
        for (index, format) in FORMATS.iter().enumerate() {
            assert!(FORMATS[..index].iter().all(|other| other.id != format.id && other.name != format.name));
        }
    }
}
