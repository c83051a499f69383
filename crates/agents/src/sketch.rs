//! A sketch of many numbers: count, sum, and quantiles within one percent. Sketches can be merged.
//!
//! A number is counted in the bucket of its logarithm; a bucket is two percent wide.

use std::collections::BTreeMap;

/// The ratio of the bounds of a bucket.
const BUCKET_GROWTH: f64 = 1.02;

/// Count, mean and quantiles of numbers that are not negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantileSketch {
    count: u64,
    sum: f64,
    zeros: u64,
    buckets: BTreeMap<i32, u64>,
}

impl QuantileSketch {
    /// Adds a number. NaN, infinite and negative numbers count as 0.
    pub fn add(&mut self, number: f64) {
        self.count += 1;
        if number.is_finite() && number > f64::MIN_POSITIVE {
            self.sum += number;
            *self.buckets.entry((number.ln() / BUCKET_GROWTH.ln()).ceil() as i32).or_default() += 1;
        } else {
            self.zeros += 1;
        }
    }

    /// Adds the numbers of another sketch.
    pub fn merge(&mut self, other: &QuantileSketch) {
        self.count += other.count;
        self.sum += other.sum;
        self.zeros += other.zeros;
        for (bucket, count) in &other.buckets {
            *self.buckets.entry(*bucket).or_default() += count;
        }
    }

    /// The count.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The mean.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// The quantile of a share between 0 and 1.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        if self.count == 0 {
            return None;
        }
        let rank = (share.clamp(0.0, 1.0) * (self.count - 1) as f64).floor() as u64;
        let mut counted = self.zeros;
        if rank < counted {
            return Some(0.0);
        }
        for (bucket, count) in &self.buckets {
            counted += count;
            if rank < counted {
                // The middle of the bucket: the relative error to both of its bounds is the same.
                return Some(2.0 * BUCKET_GROWTH.powi(*bucket) / (BUCKET_GROWTH + 1.0));
            }
        }
        None
    }

    /// The sketch as one line of text.
    #[must_use]
    pub fn to_line(&self) -> String {
        let buckets: Vec<String> = self.buckets.iter().map(|(b, n)| format!("{b}:{n}")).collect();
        format!("{} {} {} {}", self.count, self.sum, self.zeros, buckets.join(","))
    }

    /// Parses a line of [`QuantileSketch::to_line`].
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(4, ' ');
        let mut field = || fields.next();
        let (count, sum) = (field()?.parse().ok()?, field()?.parse().ok()?);
        let (zeros, buckets) = (field()?.parse().ok()?, field()?);
        let bucket = |pair: &str| {
            let (bucket, count) = pair.split_once(':')?;
            Some((bucket.parse().ok()?, count.parse().ok()?))
        };
        let buckets: Option<BTreeMap<i32, u64>> =
            buckets.split(',').filter(|pair| !pair.is_empty()).map(bucket).collect();
        Some(Self { count, sum, zeros, buckets: buckets? })
    }
}
