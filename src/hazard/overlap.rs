//! Which bytes two strided regions share, exactly.

use std::ops::Range;

use crate::device::Region;

use super::Benign;

/// Shared bytes of two regions, split into those that matter and those known to be harmless.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overlap {
    /// The smallest range that holds every shared byte that matters.
    pub bytes: Range<u64>,
    /// Number of shared bytes that matter.
    pub shared: u64,
    /// Number of shared bytes inside benign ranges.
    pub benign: u64,
}

impl Overlap {
    /// The bytes that `a` and `b` share, walking the rows of both once; `benign` is sorted and disjoint.
    pub fn of(a: &Region, b: &Region, benign: &[Benign]) -> Self {
        let mut found = Self::default();
        if a.span().is_empty() || b.span().is_empty() {
            return found;
        }
        let (mut rows_a, mut rows_b) = (Rows::new(a, b), Rows::new(b, a));
        while let (Some(x), Some(y)) = (rows_a.current(), rows_b.current()) {
            let piece = x.start.max(y.start)..x.end.min(y.end);
            if piece.start < piece.end {
                found.add(piece, benign);
            }
            if x.end <= y.end {
                rows_a.advance();
            } else {
                rows_b.advance();
            }
        }
        found
    }

    fn add(&mut self, piece: Range<u64>, benign: &[Benign]) {
        let mut at = piece.start;
        let first = benign.partition_point(|b| b.bytes.end <= piece.start);
        for harmless in benign[first..].iter().take_while(|b| b.bytes.start < piece.end) {
            let (start, end) = (harmless.bytes.start.max(at), harmless.bytes.end.min(piece.end));
            self.count(at..start);
            self.benign += end - start;
            at = end;
        }
        self.count(at..piece.end);
    }

    fn count(&mut self, piece: Range<u64>) {
        if piece.start >= piece.end {
            return;
        }
        self.shared += piece.end - piece.start;
        self.bytes = if self.bytes.is_empty() {
            piece
        } else {
            self.bytes.start.min(piece.start)..self.bytes.end.max(piece.end)
        };
    }
}

/// The rows of a region from the first that can reach `other`.
struct Rows {
    region: Region,
    next: u64,
}

impl Rows {
    fn new(region: &Region, other: &Region) -> Self {
        let mut region = *region;
        if region.row_stride <= region.len {
            // Rows without gaps are one run of bytes.
            let span = region.span();
            region = Region::contiguous(span.start, span.end - span.start);
        }
        let reach = other.span().start;
        let skip = (reach.saturating_sub(region.base)).checked_div(region.row_stride).unwrap_or(0);
        Self { region, next: skip.saturating_sub(1).min(region.rows) }
    }

    fn current(&self) -> Option<Range<u64>> {
        (self.next < self.region.rows).then(|| self.region.row(self.next))
    }

    fn advance(&mut self) {
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::RngExt;

    use super::*;
    use crate::seed::Seed;

    fn bytes(region: &Region) -> BTreeSet<u64> {
        (0..region.rows).flat_map(|row| region.row(row)).collect()
    }

    #[test]
    fn agrees_with_sets_of_bytes() {
        let (mut sharing, mut interleaved) = (0, 0);
        for case in 0..400 {
            let mut rng = Seed(case).rng();
            let mut region = || {
                let len = rng.random_range(0..9_u64);
                let row_stride = len + rng.random_range(0..9_u64);
                Region { base: rng.random_range(0..40), row_stride, len, rows: rng.random_range(0..6) }
            };
            let (a, b) = (region(), region());
            let benign =
                [Benign { bytes: 12..15, reason: String::new() }, Benign { bytes: 30..33, reason: String::new() }];
            let common: BTreeSet<u64> = bytes(&a).intersection(&bytes(&b)).copied().collect();
            let harmless = |byte: &u64| benign.iter().any(|b| b.bytes.contains(byte));
            let matter: Vec<u64> = common.iter().copied().filter(|byte| !harmless(byte)).collect();
            let found = Overlap::of(&a, &b, &benign);
            assert_eq!(found.shared, matter.len() as u64, "{a:?} {b:?}");
            assert_eq!(found.benign, (common.len() - matter.len()) as u64, "{a:?} {b:?}");
            if let (Some(first), Some(last)) = (matter.first(), matter.last()) {
                assert_eq!(found.bytes, *first..last + 1);
                sharing += 1;
            } else {
                let (s, t) = (a.span(), b.span());
                interleaved += u32::from(s.start < t.end && t.start < s.end);
            }
        }
        assert!(sharing > 50 && interleaved > 10, "{sharing} sharing, {interleaved} interleaved: too few to mean much");
    }
}
