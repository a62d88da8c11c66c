//! Activations times quantised weight rows: the one kernel that every phase, the vocabulary head and
//! the benchmarks go through.
//!
//! Formats with integer codes are multiplied as integers ([`crate::kernels::coded`]), the others value by
//! value in f32 ([`crate::kernels::dot`]).

use super::acts::{Wanted, quantise};
use super::coded::{BAND, Coded, Kernels, Rows};
use super::dot::{LANES, Lanes, accumulate, accumulate_plain, reduce};
use crate::quants::Format;
use crate::{Result, fail};
use std::cell::RefCell;
#[cfg(not(target_family = "wasm"))]
use std::sync::atomic::{AtomicUsize, Ordering};

/// Weight rows that are dequantised and multiplied together: enough independent sums to fill the
/// pipeline of a core, few enough to stay in its registers.
const TILE_ROWS: usize = 4;
/// Columns of a tile: a whole number of blocks of every format, and of lanes.
const TILE_COLS: usize = 256;
/// Batch rows that share one dequantised tile.
const TILE_BATCH: usize = 32;

/// Which code computes. Both give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The fastest that the build has.
    Fast,
    /// The plain twin.
    Plain,
}

/// Consecutive rows of a weight matrix.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    format: &'static Format,
    bytes: &'a [u8],
    row_bytes: usize,
    cols: usize,
}

impl<'a> Weights<'a> {
    /// `rows` rows of `cols` elements in `bytes`, or an error that names `what` and both lengths.
    pub fn new(
        what: impl std::fmt::Display,
        format: &'static Format,
        cols: usize,
        rows: usize,
        bytes: &'a [u8],
    ) -> Result<Self> {
        let row_bytes = format.row_bytes(cols)?;
        if row_bytes.checked_mul(rows) != Some(bytes.len()) {
            fail!(
                BadArgument,
                "{what}: {rows} rows of {cols} elements in {} are {} bytes, but {} were given",
                format.name,
                row_bytes as u64 * rows as u64,
                bytes.len()
            );
        }
        Ok(Self { format, bytes, row_bytes, cols })
    }

    /// Rows there are.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Writes one row's values.
    pub fn dequantise(&self, row: usize, out: &mut [f32]) {
        self.format.dequantise(&self.bytes[row * self.row_bytes..][..self.row_bytes], out);
    }

    /// Writes `cols` values of `row` from column `from` on.
    fn dequantise_part(&self, row: usize, from: usize, out: &mut [f32]) {
        let at = row * self.row_bytes + from / self.format.elements * self.format.bytes;
        let length = out.len() / self.format.elements * self.format.bytes;
        self.format.dequantise(&self.bytes[at..at + length], out);
    }
}

/// Rows longer than this are multiplied value by value, on every host.
const MOST_COLS: usize = 1 << 17;
/// Batch rows that share unpacked codes at most.
const CODED_BATCH: usize = 64;
/// Bytes for the integers of as many batch rows as fit, and of one of any length.
const WORK_BYTES: usize = if cfg!(target_family = "wasm") { 512 << 10 } else { 2 << 20 };

thread_local! {
    /// Where batch rows are kept as integers during a product. It is made once.
    static WORK: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Makes room for the integers of batch rows, so that no product has to.
pub fn prepare() {
    WORK.with_borrow_mut(|work| work.resize(WORK_BYTES / 4, 0));
}

/// Takes products as they are made: the first weight row, the batch row, and the values of consecutive weight rows.
type Emit<'a> = &'a mut dyn FnMut(usize, usize, &[f32]);

/// Calls `emit(row, batch_row, values)` with the products of consecutive weight rows, from `row` on, with every
/// row of `x`, which is f32 [batch, cols].
///
/// A value depends on the weight row and the activations of its batch row alone: not on the rows beside it, nor
/// on how a matrix is cut into blocks, nor on the host.
pub fn matmul(weights: &Weights<'_>, x: &[f32], mut emit: impl FnMut(usize, usize, &[f32])) {
    let emit: Emit<'_> = &mut emit;
    match weights.format.integers() {
        Some(coded) if weights.cols <= MOST_COLS => match coded.kernels() {
            Some(kernels) => by_kernels(coded, kernels, weights, x, emit),
            None => by_twin(coded, weights, x, emit),
        },
        _ => by_value(Path::Fast, weights, x, emit),
    }
}

/// [`matmul`] with the plain twins of the SIMD code.
pub fn matmul_plain(weights: &Weights<'_>, x: &[f32], mut emit: impl FnMut(usize, usize, &[f32])) {
    let emit: Emit<'_> = &mut emit;
    match weights.format.integers() {
        Some(coded) if weights.cols <= MOST_COLS => by_twin(coded, weights, x, emit),
        _ => by_value(Path::Plain, weights, x, emit),
    }
}

fn by_twin(coded: &Coded, weights: &Weights<'_>, x: &[f32], emit: Emit<'_>) {
    for (batch_row, x) in x.chunks_exact(weights.cols).enumerate() {
        for (row, bytes) in weights.bytes.chunks_exact(weights.row_bytes).enumerate() {
            emit(row, batch_row, &[coded.plain(bytes, x)]);
        }
    }
}

fn by_kernels(coded: &Coded, kernels: Kernels, weights: &Weights<'_>, x: &[f32], emit: Emit<'_>) {
    let cols = weights.cols;
    let batch = x.len() / cols;
    let fits = (WORK_BYTES / Wanted::row_bytes(cols)).clamp(1, CODED_BATCH);
    let (tile, lanes) = match kernels.narrow {
        Some(narrow) if batch <= narrow.1 => narrow,
        _ => kernels.tile,
    };
    // So few rows that half the lanes would be empty, or rows too long to stand beside each other, one by one.
    let alone = 2 * batch <= lanes || fits < lanes;
    let (lanes, at_once) = if alone { (1, fits) } else { (lanes, fits / lanes * lanes) };
    let wanted = coded.wanted(cols, lanes, kernels.wide);
    WORK.with_borrow_mut(|work| {
        work.resize(WORK_BYTES / 4, 0);
        let mut values = [0.0; BAND];
        for (index, x) in x.chunks(at_once * cols).enumerate() {
            let count = x.len() / cols;
            let stride = count.next_multiple_of(lanes);
            let acts = quantise(wanted, x, work);
            let multiply = |bytes: &[u8], products: &mut [f32]| {
                touch(bytes);
                let rows = Rows { bytes, row_bytes: weights.row_bytes };
                let n_rows = bytes.len() / weights.row_bytes;
                // SAFETY: these are the kernels for what this processor has.
                unsafe {
                    if alone {
                        for (row, products) in products.chunks_exact_mut(BAND).enumerate() {
                            (kernels.matvec)(rows, &acts.row(row), &mut products[..n_rows]);
                        }
                    } else {
                        tile(rows, &acts, coded.layout(), kernels.unpack, products);
                    }
                }
            };
            in_bands(weights, BAND * stride, count, multiply, |band, n_rows, products| {
                for batch_row in 0..count {
                    let values = if alone {
                        &products[batch_row * BAND..][..n_rows]
                    } else {
                        for (value, products) in values.iter_mut().zip(products.chunks_exact(stride)) {
                            *value = products[batch_row];
                        }
                        &values[..n_rows]
                    };
                    emit(band * BAND, index * at_once + batch_row, values);
                }
            });
        }
    });
}

/// Multiplies the weights in bands of [`BAND`] rows, each into `room` floats, and takes the results in order.
#[cfg(target_family = "wasm")]
fn in_bands(
    weights: &Weights<'_>,
    room: usize,
    _batch: usize,
    multiply: impl Fn(&[u8], &mut [f32]),
    mut take: impl FnMut(usize, usize, &[f32]),
) {
    let mut products = [0.0; BAND * CODED_BATCH];
    for (band, bytes) in weights.bytes.chunks(BAND * weights.row_bytes).enumerate() {
        multiply(bytes, &mut products[..room]);
        take(band, bytes.len() / weights.row_bytes, &products[..room]);
    }
}

/// The same, on as many threads as were asked for: each has some bands, so that bits do not depend on it.
#[cfg(not(target_family = "wasm"))]
fn in_bands(
    weights: &Weights<'_>,
    room: usize,
    batch: usize,
    multiply: impl Fn(&[u8], &mut [f32]) + Sync,
    mut take: impl FnMut(usize, usize, &[f32]),
) {
    let band_bytes = BAND * weights.row_bytes;
    let bands = weights.bytes.len().div_ceil(band_bytes);
    let enough = weights.rows() * weights.cols * batch / LEAST_SHARE;
    let threads = THREADS.load(Ordering::Relaxed).min(enough).min(bands).max(1);
    let share = bands.div_ceil(threads);
    PRODUCTS.with_borrow_mut(|products| {
        // On one thread the room of one band serves all of them.
        products.resize(products.len().max(room * if threads == 1 { 1 } else { bands }), 0.0);
        if threads == 1 {
            for (band, bytes) in weights.bytes.chunks(band_bytes).enumerate() {
                multiply(bytes, &mut products[..room]);
                take(band, bytes.len() / weights.row_bytes, &products[..room]);
            }
            return;
        }
        let products = &mut products[..room * bands];
        let multiply = &multiply;
        std::thread::scope(|scope| {
            let shares = weights.bytes.chunks(share * band_bytes).zip(products.chunks_mut(share * room));
            for (i, (bytes, products)) in shares.enumerate() {
                let mut work = move || {
                    for (bytes, products) in bytes.chunks(band_bytes).zip(products.chunks_mut(room)) {
                        multiply(bytes, products);
                    }
                };
                // The last share is this thread's.
                if i + 1 < threads && bytes.len() == share * band_bytes {
                    scope.spawn(work);
                } else {
                    work();
                }
            }
        });
        for (band, products) in products.chunks(room).enumerate() {
            take(band, BAND.min(weights.rows() - band * BAND), products);
        }
    });
}

/// Weights times rows that are worth a thread of their own.
#[cfg(not(target_family = "wasm"))]
const LEAST_SHARE: usize = 1 << 20;

#[cfg(not(target_family = "wasm"))]
static THREADS: AtomicUsize = AtomicUsize::new(1);

#[cfg(not(target_family = "wasm"))]
thread_local! {
    /// Where products wait for whoever takes them.
    static PRODUCTS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Lets products of this process use up to `count` threads. WebAssembly has one.
pub fn set_threads(count: usize) -> Result<()> {
    let most = if cfg!(target_family = "wasm") { 1 } else { 64 };
    if count == 0 || count > most {
        fail!(BadArgument, "{count} threads, expected 1 to {most}");
    }
    #[cfg(not(target_family = "wasm"))]
    THREADS.store(count, Ordering::Relaxed);
    Ok(())
}

/// Brings weights near: many reads are under way at once here, few in a kernel. Native memory has large pages,
/// in which the processor does it by itself.
#[inline(always)]
fn touch(bytes: &[u8]) {
    if cfg!(target_family = "wasm") {
        for line in bytes.chunks(64) {
            // SAFETY: the first byte of a slice that has one.
            unsafe { line.as_ptr().read_volatile() };
        }
    }
}

fn by_value(path: Path, weights: &Weights<'_>, x: &[f32], emit: Emit<'_>) {
    let mut lanes = [[[0.0; LANES]; TILE_ROWS]; TILE_BATCH];
    for (tile, x) in x.chunks(TILE_BATCH * weights.cols).enumerate() {
        let batch = x.len() / weights.cols;
        for row in (0..weights.rows()).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(weights.rows() - row);
            if rows == TILE_ROWS {
                multiply_tile::<TILE_ROWS>(path, weights, row, x, &mut lanes[..batch]);
            } else {
                multiply_rest(path, weights, row, rows, x, &mut lanes[..batch]);
            }
            for (batch_row, lanes) in lanes[..batch].iter().enumerate() {
                let values = lanes.each_ref().map(reduce);
                emit(row, tile * TILE_BATCH + batch_row, &values[..rows]);
            }
        }
    }
}

/// Leaves in `lanes` the partial sums of `ROWS` weight rows from `row` on.
fn multiply_tile<const ROWS: usize>(
    path: Path,
    weights: &Weights<'_>,
    row: usize,
    x: &[f32],
    lanes: &mut [[Lanes; ROWS]],
) {
    let mut tile = [[0.0; TILE_COLS]; ROWS];
    lanes.fill([[0.0; LANES]; ROWS]);
    for from in (0..weights.cols).step_by(TILE_COLS) {
        let cols = TILE_COLS.min(weights.cols - from);
        for (i, values) in tile.iter_mut().enumerate() {
            weights.dequantise_part(row + i, from, &mut values[..cols]);
        }
        let values = tile.each_ref().map(|values| &values[..cols]);
        for (x, lanes) in x.chunks_exact(weights.cols).zip(lanes.iter_mut()) {
            let x = &x[from..from + cols];
            match path {
                Path::Fast => accumulate(values, x, lanes),
                Path::Plain => {
                    values.iter().zip(lanes).for_each(|(w, lanes)| accumulate_plain(lanes, w, x));
                }
            }
        }
    }
}

/// The same for fewer rows than a tile has, one by one.
fn multiply_rest(
    path: Path,
    weights: &Weights<'_>,
    row: usize,
    rows: usize,
    x: &[f32],
    lanes: &mut [[Lanes; TILE_ROWS]],
) {
    let mut one = [[[0.0; LANES]; 1]; TILE_BATCH];
    for i in 0..rows {
        multiply_tile(path, weights, row + i, x, &mut one[..lanes.len()]);
        for (lanes, one) in lanes.iter_mut().zip(&one) {
            lanes[i] = one[0];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_change_no_bit() {
        let (cols, rows) = (2048, 64 * 21 + 5);
        let format = Format::of_type(8).unwrap();
        let bytes: Vec<u8> = (0..rows * cols / 32)
            .flat_map(|block| {
                let scale = (0x2C00 + block as u16 % 512).to_le_bytes();
                let codes = (0..32).map(move |i| (block * 37 + i * 101) as u8);
                scale.into_iter().chain(codes)
            })
            .collect();
        let weights = Weights::new("w", format, cols, rows, &bytes).unwrap();
        for batch in [1, 5, 40] {
            let x: Vec<f32> = (0..batch * cols).map(|i| (i % 1013) as f32 - 500.0).collect();
            let product = || {
                let mut y = vec![0.0; batch * rows];
                matmul(&weights, &x, |row, batch_row, values| {
                    y[batch_row * rows + row..][..values.len()].copy_from_slice(values);
                });
                y
            };
            let expected = product();
            for threads in [2, 3, 64] {
                set_threads(threads).unwrap();
                assert!(product() == expected, "{batch} rows on {threads} threads");
            }
            set_threads(1).unwrap();
        }
        assert!(set_threads(0).is_err() && set_threads(65).is_err());
    }

    #[test]
    fn kernels_have_the_bits_of_the_plain_twin() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        for id in [2, 3, 6, 7, 8, 12, 13, 14] {
            let format = Format::of_type(id).unwrap();
            let coded = format.integers().unwrap();
            // Every processor of this kind has some.
            assert!(coded.kernels().is_some() || cfg!(not(target_arch = "aarch64")));
            let (cols, rows) = (if format.elements == 32 { 288 } else { 512 }, 19);
            let bytes: Vec<u8> = (0..rows * format.row_bytes(cols).unwrap()).map(|_| next() as u8).collect();
            let weights = Weights::new("w", format, cols, rows, &bytes).unwrap();
            for batch in [1, 3, 8, 20, 65] {
                let x: Vec<f32> = (0..batch * cols).map(|_| next() as f32 / 8_388_608.0 - 1.0).collect();
                let product = |kernels: Option<Kernels>| {
                    let mut y = vec![0.0f32; batch * rows];
                    let mut keep = |row: usize, batch_row: usize, values: &[f32]| {
                        y[batch_row * rows + row..][..values.len()].copy_from_slice(values);
                    };
                    match kernels {
                        Some(kernels) => by_kernels(coded, kernels, &weights, &x, &mut keep),
                        None => by_twin(coded, &weights, &x, &mut keep),
                    }
                    // Some scales are no numbers; a NaN may have any bits.
                    y.iter().map(|y| if y.is_nan() { None } else { Some(y.to_bits()) }).collect::<Vec<_>>()
                };
                let expected = product(None);
                assert!(expected.iter().any(Option::is_some));
                for kernels in coded.every() {
                    let name = kernels.name;
                    assert!(product(Some(kernels)) == expected, "{}, {batch} rows, {name}", format.name);
                }
            }
        }
    }
}
