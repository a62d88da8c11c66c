//! Every host computes the same bits: what each operation makes of some numbers, as a digest. Whoever changes what
//! an operation computes on purpose writes down the new one.

use distributed_inference::kernels::matmul::{Weights, matmul};
use distributed_inference::kv::PAGE_TOKENS;
use distributed_inference::ops::attention::Online;
use distributed_inference::ops::rope::{Pairing, angles, frequencies, rotate};
use distributed_inference::ops::{exp, norm, silu};
use distributed_inference::quants::{Format, to_half};
use distributed_inference::shard::noise;
use xxhash_rust::xxh3::xxh3_64;

/// Numbers between −1 and 1 that look random.
struct Numbers(u32);

impl Numbers {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        self.0 >> 8
    }

    fn vector(&mut self, length: usize, most: f32) -> Vec<f32> {
        (0..length).map(|_| (self.bits() as f32 / 8_388_608.0 - 1.0) * most).collect()
    }
}

fn digest(values: impl IntoIterator<Item = f32>) -> u64 {
    // A NaN may have any bits.
    let bits = values.into_iter().map(|value| if value.is_nan() { f32::NAN } else { value }.to_bits());
    xxh3_64(&bits.flat_map(u32::to_le_bytes).collect::<Vec<_>>())
}

fn digest_of_doubles(values: impl IntoIterator<Item = f64>) -> u64 {
    xxh3_64(&values.into_iter().flat_map(|value| value.to_bits().to_le_bytes()).collect::<Vec<_>>())
}

#[test]
fn what_is_between_the_products() {
    let mut numbers = Numbers(1);
    let mut found = Vec::new();
    let x = numbers.vector(5_000, 110.0);
    found.push(("exp", digest(x.iter().map(|x| exp::exp(*x)))));
    found.push((
        "exp in f64",
        digest_of_doubles(x.iter().map(|x| exp::exp_of_negative(-f64::from(x.abs()) * 6.5))),
    ));
    found.push(("silu", digest(x.iter().map(|x| silu::silu(*x)))));
    found.push(("half precision", digest(x.iter().map(|x| f32::from(to_half(*x * x))))));
    found.push(("Gumbel noise", digest_of_doubles((0..5_000).map(|id| noise(42, id)))));

    let mut normal = vec![0.0; 1_001];
    norm::rms_norm(&x[..1_001], &x[1_001..2_002], 1e-6, &mut normal);
    found.push(("RMSNorm", digest(normal)));

    let frequencies = frequencies(128, 1e6);
    found.push(("frequencies", digest_of_doubles(frequencies.iter().copied())));
    let mut turned = numbers.vector(4 * 128, 3.0);
    for (position, pairing) in [(7, Pairing::Halves), (31_337, Pairing::Interleaved)] {
        let mut of_position = vec![0.0; 128];
        angles(position, &frequencies, &mut of_position);
        rotate(&mut turned, 128, pairing, &of_position);
    }
    found.push(("RoPE", digest(turned)));

    let (query, mut out) = (numbers.vector(80, 2.0), vec![0.0; 80]);
    let mut online = Online::new(&query, 0.11, &mut out);
    for tokens in [PAGE_TOKENS, PAGE_TOKENS, 5] {
        let (keys, values) = (numbers.vector(PAGE_TOKENS * 80, 2.0), numbers.vector(PAGE_TOKENS * 80, 2.0));
        online.page(&keys, &values, tokens);
    }
    online.end();
    found.push(("attention", digest(out)));
    let expected = [
        ("exp", 0xDF9C_C439_F2CA_4115),
        ("exp in f64", 0xD4AB_1C5F_2387_D676),
        ("silu", 0x9DDD_E704_6A2D_FA70),
        ("half precision", 0xE3BC_6345_CBF1_39FC),
        ("Gumbel noise", 0x7944_1C76_F65C_03CC),
        ("RMSNorm", 0xCE1A_876B_F3E5_C5FB),
        ("frequencies", 0xD755_E99F_9EBC_42BB),
        ("RoPE", 0x2A6A_C992_396B_052C),
        ("attention", 0x1087_895F_E0A0_3514),
    ];
    assert_eq!(found, expected);
}

#[test]
fn products_of_every_format() {
    let expected = [
        ("F32", 0x3886_3D2B_235E_A88F),
        ("F16", 0x2B40_8C12_D3EF_9416),
        ("Q4_0", 0xC54A_8915_38B6_94C6),
        ("Q4_1", 0x5D0C_52B6_C919_3C39),
        ("Q5_0", 0xE99A_D8A8_ECC7_14F2),
        ("Q5_1", 0xE1CA_96CF_CA25_5E41),
        ("Q8_0", 0x5BD2_817A_6F80_D9D4),
        ("Q2_K", 0x4AD0_EE53_B185_8454),
        ("Q3_K", 0xE63D_774A_4214_0A00),
        ("Q4_K", 0x9B5C_77E1_1407_7AC9),
        ("Q5_K", 0x82B1_B504_60C3_0E28),
        ("Q6_K", 0xFD9E_C331_096F_BD2F),
        ("IQ4_NL", 0xE540_FDAD_39EE_9591),
        ("IQ4_XS", 0x66B9_FA0B_2989_688F),
        ("BF16", 0x3506_E228_28AA_2B02),
        ("MXFP4", 0xCAE2_2BBA_0977_0DAD),
    ];
    let mut numbers = Numbers(2);
    let digests: Vec<(&str, u64)> = [0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 30, 39]
        .into_iter()
        .map(|id| {
            let (format, cols, rows) = (Format::of_type(id).unwrap(), 512, 13);
            let length = rows * format.row_bytes(cols).unwrap();
            let mut bytes: Vec<u8> = (0..length).map(|_| numbers.bits() as u8).collect();
            if format.elements == 1 {
                // Exponents of ordinary numbers, in f32, f16 and bf16.
                bytes
                    .iter_mut()
                    .skip(format.bytes - 1)
                    .step_by(format.bytes)
                    .for_each(|b| *b = *b & 0x87 | 0x38);
            }
            let weights = Weights::new("w", format, cols, rows, &bytes).unwrap();
            let mut products = Vec::new();
            for batch in [1, 21] {
                let x = numbers.vector(batch * cols, 1.0);
                let mut y = vec![0.0; batch * rows];
                matmul(&weights, &x, |row, batch_row, values| {
                    y[batch_row * rows + row..][..values.len()].copy_from_slice(values);
                });
                products.extend(y);
            }
            (format.name, digest(products))
        })
        .collect();
    assert_eq!(digests, expected);
}
