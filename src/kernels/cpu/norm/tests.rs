use super::*;

fn rounded_to(dtype: DType, value: f32) -> f32 {
    if dtype == DType::BF16 {
        BF16::narrow(value).widen()
    } else if dtype == DType::F16 {
        F16::narrow(value).widen()
    } else {
        value
    }
}

/// The normalised row and the sum by the definition, element by element.
fn expected(
    norm: &Norm,
    sources: &[Vec<f32>],
    residual: &[f32],
    weight: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let round = |value: f32| rounded_to(norm.dtype, value);
    let sum = (0..norm.hidden).map(|i| {
        round(
            round(sources[1..].iter().fold(sources[0][i], |sum, other| sum + other[i]))
                + residual[i],
        )
    });
    let sum: Vec<f32> = sum.collect();
    let mut groups: Vec<f32> = sum
        .chunks(8)
        .map(|x| {
            let q: Vec<f32> = x.iter().map(|x| x * x).collect();
            ((q[0] + q[4]) + (q[2] + q[6])) + ((q[1] + q[5]) + (q[3] + q[7]))
        })
        .collect();
    groups.resize(2048, 0.0);
    let mut lanes: Vec<f32> = (0..1024).map(|lane| groups[lane] + groups[lane + 1024]).collect();
    let halves = |values: &[f32]| {
        let mut values = values.to_vec();
        while values.len() > 1 {
            let half = values.len() / 2;
            values = (0..half).map(|i| values[i] + values[i + half]).collect();
        }
        values[0]
    };
    lanes = lanes.chunks(32).map(halves).collect();
    let inverse = 1.0 / (halves(&lanes) / norm.hidden as f32 + norm.eps).sqrt();
    (sum.iter().zip(weight).map(|(x, w)| round(x * inverse * w)).collect(), sum)
}

fn values(count: usize, seed: u64, dtype: DType) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| rounded_to(dtype, next() * 3.0)).collect()
}

fn bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let of = |&value: &f32| {
        if dtype == DType::BF16 {
            BF16::narrow(value).0.to_le_bytes().to_vec()
        } else if dtype == DType::F16 {
            F16::narrow(value).0.to_le_bytes().to_vec()
        } else {
            value.to_le_bytes().to_vec()
        }
    };
    values.iter().flat_map(of).collect()
}

/// Runs `rows` rows; returns the normalised rows, the sums and the scales.
fn run_on(
    isa: Isa,
    norm: &Norm,
    sources: &[Vec<u8>],
    residual: &[u8],
    weight: &[u8],
    scale: f32,
) -> [Vec<u8>; 3] {
    let rows = norm.rows;
    let mut outputs = [norm.normed_bytes(), norm.row_bytes(), norm.scale_bytes()]
        .map(|bytes| vec![0xEE; bytes * rows]);
    let pointers: Vec<*const u8> = sources.iter().map(|source| source.as_ptr()).collect();
    let [normed, sum, scales] = &mut outputs;
    let memory = NormRows {
        sources: &pointers,
        order: SumOrder::Rank,
        residual: residual.as_ptr(),
        weight: weight.as_ptr(),
        scale: (&raw const scale).cast(),
        normed: normed.as_mut_ptr(),
        sum: sum.as_mut_ptr(),
        scales: scales.as_mut_ptr(),
    };
    // SAFETY: all have `rows` rows; the CPU has `isa`.
    unsafe { add_rms_norm_on(isa, norm, rows, &memory) };
    outputs
}

#[test]
fn every_instruction_set_has_the_bits_of_the_definition_whatever_the_rows() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for hidden in [8, 72, 1024, 4096, 8200, 16384] {
            let rows = 3;
            let norm = Norm { dtype, hidden, rows, eps: 1e-5, normed: Normed::Same };
            let sources: Vec<Vec<f32>> =
                (1..4).map(|seed| values(rows * hidden, seed, dtype)).collect();
            let (residual, weight) = (values(rows * hidden, 7, dtype), values(hidden, 8, dtype));
            let given: Vec<Vec<u8>> = sources.iter().map(|source| bytes(dtype, source)).collect();
            let (residual_bytes, weight_bytes) = (bytes(dtype, &residual), bytes(dtype, &weight));
            for &isa in Isa::available() {
                let [normed, sum, _] =
                    run_on(isa, &norm, &given, &residual_bytes, &weight_bytes, 1.0);
                for row in 0..rows {
                    let part = row * hidden..(row + 1) * hidden;
                    let of_row: Vec<Vec<f32>> =
                        sources.iter().map(|source| source[part.clone()].to_vec()).collect();
                    let (wanted, wanted_sum) = expected(&norm, &of_row, &residual[part], &weight);
                    let place = row * norm.row_bytes()..(row + 1) * norm.row_bytes();
                    assert_eq!(
                        sum[place.clone()],
                        bytes(dtype, &wanted_sum),
                        "{dtype:?} {hidden} {isa:?}"
                    );
                    assert_eq!(normed[place], bytes(dtype, &wanted), "{dtype:?} {hidden} {isa:?}");
                }
            }
        }
    }
}

#[test]
fn quantized_rows_are_those_of_the_normed_ones() {
    let (dtype, hidden, rows) = (DType::BF16, 1032, 2);
    let same = Norm { dtype, hidden, rows, eps: 1e-6, normed: Normed::Same };
    let given = [bytes(dtype, &values(rows * hidden, 3, dtype))];
    let (residual, weight) =
        (bytes(dtype, &values(rows * hidden, 4, dtype)), bytes(dtype, &values(hidden, 5, dtype)));
    for &isa in Isa::available() {
        let [normed, sum, _] = run_on(isa, &same, &given, &residual, &weight, 1.0);
        let normed: Vec<f32> = normed
            .as_chunks::<2>()
            .0
            .iter()
            .map(|&code| BF16(u16::from_le_bytes(code)).widen())
            .collect();
        // A scale so small that some scaled numbers are out of range.
        let scale = 0.01f32;
        let [quantized, sum_too, _] = run_on(
            isa,
            &Norm { normed: Normed::Static, ..same },
            &given,
            &residual,
            &weight,
            scale,
        );
        let wanted: Vec<u8> = normed
            .iter()
            .map(|x| E4M3Fn::narrow((x * (1.0 / scale)).clamp(-448.0, 448.0)).0)
            .collect();
        assert_eq!((quantized, &sum_too), (wanted, &sum), "{isa:?}");
        let [quantized, _, scales] = run_on(
            isa,
            &Norm { normed: Normed::Dynamic, ..same },
            &given,
            &residual,
            &weight,
            scale,
        );
        for (row, normed) in normed.chunks(hidden).enumerate() {
            let scale = normed.iter().fold(0f32, |most, x| most.max(x.abs())) / 448.0;
            assert_eq!(scales[row * 4..row * 4 + 4], scale.to_le_bytes(), "{isa:?}");
            let wanted: Vec<u8> =
                normed.iter().map(|x| E4M3Fn::narrow((x / scale).clamp(-448.0, 448.0)).0).collect();
            assert_eq!(quantized[row * hidden..(row + 1) * hidden], wanted, "{isa:?}");
        }
    }
}

#[test]
fn a_row_of_zeros_has_the_least_scale_and_a_nan_spreads_over_its_row_alone() {
    let norm = Norm { dtype: DType::F32, hidden: 16, rows: 2, eps: 1e-6, normed: Normed::Dynamic };
    let mut input = vec![0f32; 32];
    input[20] = f32::NAN;
    let (input, zeros, ones) =
        (bytes(DType::F32, &input), vec![0u8; 128], bytes(DType::F32, &[1.0; 16]));
    for &isa in Isa::available() {
        let [quantized, _, scales] =
            run_on(isa, &norm, std::slice::from_ref(&input), &zeros, &ones, 1.0);
        assert_eq!(
            (&quantized[..16], &quantized[16..]),
            (&[0u8; 16][..], &[0x7f; 16][..]),
            "{isa:?}"
        );
        assert_eq!(scales[..4], LEAST_SCALE.to_le_bytes());
        assert_eq!(scales[4..], f32::from_bits(0x7fc0_0000).to_le_bytes());
    }
}
