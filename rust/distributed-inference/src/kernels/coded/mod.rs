//! Products of integer activations with the integer codes of quantised weights.
//!
//! A weight is `scale · (code − offset)` or `scale · code − minimum`, with one scale for a unit of 16 or 32
//! elements; an activation is `step · X` (see [`crate::kernels::acts`]). One row's result is
//!
//! ```text
//! sum = 0
//! for every unit, in order:
//!     sum += (scale · step) · f32(Σ code · X − offset · ΣX)
//!     sum −= minimum · (step · f32(ΣX))                        where weights have minimums
//! ```
//!
//! in f32, each operation rounded on its own. The integers are exact and fit 32 bits, so nothing but this
//! order decides the bits: not the instructions, the lanes, nor the rows beside it. [`plain`] is that sentence
//! as code. One row of activations is multiplied by [`matvec::matvec`], with weight rows in the lanes of a vector;
//! more by [`tile::tile`], with activation rows in the lanes.

mod entries;
mod isa;
mod matvec;
#[cfg(target_arch = "aarch64")]
mod neon;
mod tile;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use super::acts::{Acts, BLOCK, Wanted, integers_of};
use crate::quants::{Codes, Subs};
pub use tile::Panel;

/// Most weight rows that are multiplied together.
const MOST_ROWS: usize = 8;
/// Elements of a row that are unpacked at a time: whole blocks of every format.
const PANEL: usize = 256;
/// Most units of a panel.
const PANEL_UNITS: usize = PANEL / 16;
/// Weight rows that [`Tile`] is called with at most: a multiple of [`MOST_ROWS`].
pub const BAND: usize = 64;

/// Weight rows: the first byte of each and how many there are.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    /// Whole rows.
    pub bytes: &'a [u8],
    /// Bytes of one.
    pub row_bytes: usize,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// The blocks of rows from `row` on, each row's first; the last row stands in for those after it.
    fn starts(&self, row: usize) -> [*const u8; MOST_ROWS] {
        let last = self.count() - 1;
        std::array::from_fn(|i| self.bytes[(row + i).min(last) * self.row_bytes..].as_ptr())
    }
}

/// Writes the product of every weight row with one row of activations.
pub type Matvec = unsafe fn(Rows<'_>, &Acts<'_>, &mut [f32]);
/// Writes the products of up to [`BAND`] weight rows with groups of activations: [weight row, activation row].
pub type Tile = unsafe fn(Rows<'_>, &Acts<'_>, Layout, Unpack, &mut [f32]);
/// Unpacks consecutive blocks of a few rows, whose first bytes are given.
pub type Unpack = unsafe fn(&[*const u8; MOST_ROWS], usize, &mut Panel);

/// The blocks of a format.
#[derive(Clone, Copy)]
pub struct Layout {
    elements: usize,
    bytes: usize,
}

/// The kernels of a format for some of this host's instructions.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// What the instructions are called here.
    pub name: &'static str,
    /// For one row of activations.
    pub matvec: Matvec,
    /// For more, and the lanes that it wants them in.
    pub tile: (Tile, usize),
    /// For no more than fill its lanes, which are fewer.
    pub narrow: Option<(Tile, usize)>,
    /// For `tile` and `narrow`.
    pub unpack: Unpack,
    /// Whether they want 16-bit activations.
    pub wide: bool,
}

/// A coded format as the front of the kernels uses it.
pub struct Coded {
    reading: Reading,
    /// The kernels for what this host can do, by number, the fastest first; none where there is nothing but the
    /// plain twin.
    kernels: fn(usize) -> Option<Kernels>,
}

impl Coded {
    /// The kernels of a format.
    pub const fn of<F: Codes>() -> Self {
        Self {
            reading: Reading {
                layout: Layout { elements: F::ELEMENTS, bytes: F::BYTES },
                unit: F::UNIT,
                offset: F::OFFSET,
                mins: F::MINS,
                codes: F::codes,
                scale: scale::<F>,
            },
            kernels: |number| host::kernels::<F>().nth(number),
        }
    }

    /// The fastest kernels of this host.
    pub fn kernels(&self) -> Option<Kernels> {
        (self.kernels)(0)
    }

    /// All kernels of this host.
    #[cfg(test)]
    pub fn every(&self) -> impl Iterator<Item = Kernels> {
        (0..).map_while(self.kernels)
    }

    /// The blocks.
    pub fn layout(&self) -> Layout {
        self.reading.layout
    }

    /// The plain twin of all kernels: one weight row times one row of activations.
    pub fn plain(&self, row: &[u8], x: &[f32]) -> f32 {
        plain(&self.reading, row, x)
    }

    /// What the kernels want of activations.
    pub fn wanted(&self, cols: usize, lanes: usize, wide: bool) -> Wanted {
        let Reading { unit, offset, mins, .. } = self.reading;
        Wanted { cols, lanes, wide, unit, offset, mins }
    }
}

#[cfg(target_arch = "aarch64")]
use neon as host;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use wasm as host;
#[cfg(target_arch = "x86_64")]
use x86 as host;

#[cfg(any(target_arch = "aarch64", all(target_arch = "wasm32", target_feature = "simd128")))]
pub use host::Constants;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub use wasm::has_dot;

/// A host that there are no kernels for.
#[cfg(not(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128"),
    target_arch = "x86_64"
)))]
mod host {
    pub fn kernels<F: super::Codes>() -> impl Iterator<Item = super::Kernels> {
        std::iter::empty()
    }
}

/// The plain reading of a format: its units, and the functions that read codes and scales.
#[derive(Clone, Copy)]
struct Reading {
    layout: Layout,
    unit: usize,
    offset: i32,
    mins: bool,
    codes: fn(&[u8], &mut [u8]),
    scale: fn(&[u8], usize) -> (f32, f32),
}

/// The definition: one weight row times one row of activations.
fn plain(reading: &Reading, row: &[u8], x: &[f32]) -> f32 {
    let Reading { layout, unit, offset, mins, .. } = *reading;
    let mut sum = 0.0;
    let mut codes = [0u8; PANEL];
    let mut integers = [0i32; BLOCK];
    for (block, x) in row.chunks_exact(layout.bytes).zip(x.chunks_exact(layout.elements)) {
        (reading.codes)(block, &mut codes[..layout.elements]);
        let mut step = 0.0;
        for at in (0..layout.elements).step_by(unit) {
            if at % BLOCK == 0 {
                step = integers_of(x[at..at + BLOCK].try_into().expect("a block"), &mut integers);
            }
            let integers = &integers[at % BLOCK..][..unit];
            let total: i32 = integers.iter().sum();
            let products: i32 = codes[at..].iter().zip(integers).map(|(code, x)| i32::from(*code) * x).sum();
            let (scale, minimum) = (reading.scale)(block, at / unit);
            sum += (scale * step) * (products - offset * total) as f32;
            if mins {
                sum -= minimum * (step * total as f32);
            }
        }
    }
    sum
}

/// Scale and minimum of a unit.
fn scale<F: Codes>(block: &[u8], unit: usize) -> (f32, f32) {
    let [d, m] = F::halves(block).map(crate::quants::from_half);
    match F::SUBS {
        Subs::None => (d, -m),
        Subs::ScalesAndMins => {
            let subs = F::subs(block);
            (d * f32::from(subs[unit]), m * f32::from(subs[unit + 8]))
        }
        Subs::Scales { .. } => (d * f32::from(F::subs(block)[unit] as i8), 0.0),
    }
}
