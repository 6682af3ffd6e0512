//! Measured times of one algorithm, and interpolation between them. Pure.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Maximum number of points of a curve.
const MAX_POINTS: usize = 256;
/// Maximum length of a tensor in bytes.
const MAX_BYTES: u64 = 1 << 50;
/// Maximum time of a call in microseconds: 17 minutes.
const MAX_US: f64 = 1e9;

/// Times of a collective by size, when one algorithm runs it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// torch's name of the collective.
    pub op: String,
    /// The algorithm, as named by `Algorithms::name`.
    pub algorithm: String,
    /// Sizes of the longest tensor that a rank sends or receives, in ascending order.
    pub bytes: Vec<u64>,
    /// The time at each size, in microseconds.
    pub us: Vec<f64>,
}

impl Curve {
    /// Checks the curve; the error says what is wrong with it.
    pub(super) fn check(&self) -> Result<()> {
        let Self { op, algorithm, bytes, us } = self;
        let refused = |why: String| Err(Error::value(format!("{op} by {algorithm}: {why}")));
        if bytes.is_empty() || bytes.len() > MAX_POINTS {
            return refused(format!("{} points; from 1 to {MAX_POINTS} are possible", bytes.len()));
        }
        if bytes.len() != us.len() {
            return refused(format!("{} sizes, but {} times", bytes.len(), us.len()));
        }
        if let Some(pair) = bytes.windows(2).find(|pair| pair[0] >= pair[1]) {
            return refused(format!("{} bytes come after {}; sizes must ascend", pair[1], pair[0]));
        }
        if let Some(size) = bytes.iter().find(|size| !(1..=MAX_BYTES).contains(size)) {
            return refused(format!("a size of {size} bytes; from 1 to {MAX_BYTES} are possible"));
        }
        if let Some(time) =
            us.iter().find(|time| !(time.is_finite() && **time > 0.0 && **time <= MAX_US))
        {
            return refused(format!(
                "a time of {time} µs; it must be above 0 and at most {MAX_US}"
            ));
        }
        Ok(())
    }

    /// Returns the microseconds for `bytes`. Between two points they are on the line through both,
    /// which amounts to a latency and a bandwidth. Below the first point they are the time of that
    /// point. Above the last point, the line of the last segment continues, or a flat line if that
    /// line falls.
    pub(super) fn at(&self, bytes: f64) -> f64 {
        let last = self.bytes.len() - 1;
        let above = self.bytes.partition_point(|&size| size as f64 <= bytes);
        if above == 0 || last == 0 {
            return self.us[if above == 0 { 0 } else { last }];
        }
        let left = (above - 1).min(last - 1);
        let (from, to) = (self.bytes[left] as f64, self.bytes[left + 1] as f64);
        let slope = (self.us[left + 1] - self.us[left]) / (to - from);
        if bytes > to {
            self.us[last] + slope.max(0.0) * (bytes - to)
        } else {
            self.us[left] + slope * (bytes - from)
        }
    }

    /// Returns the factor by which `bytes` is outside the measured sizes; 1 within them.
    pub(super) fn distance(&self, bytes: f64) -> f64 {
        let (first, last) = (self.bytes[0] as f64, self.bytes[self.bytes.len() - 1] as f64);
        (first / bytes.max(1.0)).max(bytes / last).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(points: &[(u64, f64)]) -> Curve {
        let (bytes, us) = points.iter().copied().unzip();
        Curve { op: "all_reduce".into(), algorithm: "staged".into(), bytes, us }
    }

    #[test]
    fn pieces_are_straight() {
        let curve = curve(&[(1000, 5.0), (2000, 7.0), (4000, 15.0)]);
        for (bytes, expected) in [
            (0.0, 5.0),
            (1000.0, 5.0),
            (1500.0, 6.0),
            (2000.0, 7.0),
            (3000.0, 11.0),
            (4000.0, 15.0),
            (6000.0, 23.0),
        ] {
            assert_eq!(curve.at(bytes), expected, "{bytes}");
        }
        assert_eq!(
            (curve.distance(1500.0), curve.distance(500.0), curve.distance(8000.0)),
            (1.0, 2.0, 2.0)
        );
    }

    #[test]
    fn a_single_point_is_a_time_and_times_do_not_fall_below_the_last() {
        assert_eq!([0.0, 1000.0, 1e9].map(|bytes| curve(&[(1000, 5.0)]).at(bytes)), [5.0; 3]);
        let falling = curve(&[(1000, 9.0), (2000, 7.0)]);
        assert_eq!((falling.at(1500.0), falling.at(1e6)), (8.0, 7.0));
    }

    #[test]
    fn faults_are_sentences() {
        for (points, why) in [
            (&[][..], "all_reduce by staged: 0 points; from 1 to 256 are possible"),
            (
                &[(0, 1.0)],
                "all_reduce by staged: a size of 0 bytes; from 1 to 1125899906842624 are possible",
            ),
            (
                &[(2, 1.0), (2, 1.0)],
                "all_reduce by staged: 2 bytes come after 2; sizes must ascend",
            ),
            (
                &[(1, -1.0)],
                "all_reduce by staged: a time of -1 µs; it must be above 0 and at most 1000000000",
            ),
            (
                &[(1, f64::NAN)],
                "all_reduce by staged: a time of NaN µs; it must be above 0 and at most 1000000000",
            ),
            (
                &[(1, 1e12)],
                "all_reduce by staged: a time of 1000000000000 µs; it must be above 0 and at \
                 most 1000000000",
            ),
        ] {
            assert_eq!(curve(points).check().expect_err("faulty").message, why);
        }
        let mut short = curve(&[(1, 1.0), (2, 2.0)]);
        short.us.pop();
        assert_eq!(
            short.check().expect_err("faulty").message,
            "all_reduce by staged: 2 sizes, but 1 times"
        );
    }

    proptest! {
        #[test]
        fn times_stay_between_their_points(
            us in prop::collection::vec(0.1_f64..1e6, 1..20), bytes in 0_f64..1e6
        ) {
            let points: Vec<(u64, f64)> =
                us.iter().enumerate().map(|(i, &us)| ((i as u64 + 1) * 1000, us)).collect();
            let (curve, last) = (curve(&points), points.len() as f64 * 1000.0);
            prop_assert!(curve.check().is_ok());
            let (low, high) = us
                .iter()
                .fold((f64::MAX, 0.0_f64), |(low, high), &us| (low.min(us), high.max(us)));
            let found = curve.at(bytes);
            prop_assert!(found >= low * 0.999_999 && (bytes > last || found <= high * 1.000_001));
        }
    }
}
