//! A decode step's rows as a bucket's padded inputs.

use super::{DecodeRow, Prefill, geometry::Geometry};
use crate::{
    device::kernel::{PAGE_TOKENS, RATIO},
    error::{Error, Result},
};

/// What the host writes into the static inputs before a step. Padded rows have one token, at position 0, and page 0
/// throughout.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// Bucket.
    pub(super) bucket: u32,
    /// Rows that are not padding.
    pub(super) rows: usize,
    /// Newest token of each row.
    pub(super) tokens: Vec<i32>,
    /// Its position.
    pub(super) positions: Vec<i32>,
    /// Ring page of each row.
    pub(super) ring_pages: Vec<i32>,
    /// Rows of the page table.
    pub(super) page_table: Vec<i32>,
}

impl Batch {
    /// Replaces the batch by `rows`.
    pub(super) fn fill(&mut self, rows: &[DecodeRow<'_>], geometry: &Geometry) -> Result<()> {
        let bucket = geometry.bucket(rows.len() as u32).filter(|_| !rows.is_empty()).ok_or_else(|| {
            Error::usage(format!("a step of {} rows: from 1 to {} are possible", rows.len(), geometry.max_batch()))
        })?;
        let (size, words) = (bucket as usize, geometry.table_words() as usize);
        self.bucket = bucket;
        self.rows = rows.len();
        for (column, length) in [
            (&mut self.tokens, size),
            (&mut self.positions, size),
            (&mut self.ring_pages, size),
            (&mut self.page_table, size * words),
        ] {
            column.clear();
            column.resize(length, 0);
        }
        for (number, row) in rows.iter().enumerate() {
            check_place(row.position + 1, row.page_table, row.window_page, geometry)
                .map_err(|error| error.within(format!("row {number} of a decode step")))?;
            self.tokens[number] = i32::from(row.token);
            self.positions[number] = row.position as i32;
            self.ring_pages[number] = row.window_page as i32;
            let table = self.page_table[number * words..][..words].iter_mut();
            table.zip(row.page_table).for_each(|(word, page)| *word = *page as i32);
        }
        Ok(())
    }

    /// Complete compressed entries of a row.
    pub(super) fn entries(&self, row: usize) -> u64 {
        (self.positions[row] as u64 + 1) / RATIO
    }
}

/// Checks a prefill chunk against the geometry.
pub(super) fn check_prefill(chunk: &Prefill<'_>, geometry: &Geometry) -> Result<()> {
    let end = chunk.range.end;
    if chunk.range.is_empty() || chunk.tokens.len() < end as usize {
        return Err(Error::usage(format!(
            "a prefill chunk of positions {:?} with {} tokens",
            chunk.range,
            chunk.tokens.len()
        )));
    }
    check_place(end, chunk.page_table, chunk.window_page, geometry).map_err(|error| error.within("a prefill chunk"))
}

/// Checks that `tokens` tokens of a sequence have pages, all of which exist.
fn check_place(tokens: u32, page_table: &[u32], window_page: u32, geometry: &Geometry) -> Result<()> {
    let needed = u64::from(tokens).div_ceil(PAGE_TOKENS) as usize;
    if tokens > geometry.max_context {
        return Err(Error::usage(format!("{tokens} tokens: the longest context has {}", geometry.max_context)));
    }
    if page_table.len() < needed || page_table.len() as u64 > geometry.table_words() {
        return Err(Error::usage(format!("{} pages for {tokens} tokens", page_table.len())));
    }
    if let Some(page) = page_table.iter().find(|page| **page == 0 || **page >= geometry.pages) {
        return Err(Error::usage(format!("page {page}: leased pages go from 1 to {}", geometry.pages - 1)));
    }
    if window_page == 0 || u64::from(window_page) >= geometry.ring_pages() {
        return Err(Error::usage(format!("window page {window_page}: they go from 1 to {}", geometry.max_batch())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::kernel::KeyFormat;

    fn geometry() -> Geometry {
        Geometry { max_context: 1024, buckets: vec![1, 2, 4], top_k: 8, pages: 9, keys: KeyFormat::Bf16 }
    }

    fn row(position: u32, page_table: &[u32]) -> DecodeRow<'_> {
        DecodeRow { token: 7, position, page_table, window_page: 1, session: None }
    }

    #[test]
    fn batches_pad_up_to_the_bucket() {
        let mut batch = Batch::default();
        batch.fill(&[row(300, &[3, 4]), row(7, &[5]), row(0, &[6])], &geometry()).unwrap();
        assert_eq!((batch.bucket, batch.rows), (4, 3));
        assert_eq!(batch.positions, [300, 7, 0, 0]);
        assert_eq!(batch.ring_pages, [1, 1, 1, 0]);
        assert_eq!(batch.page_table[..8], [3, 4, 0, 0, 5, 0, 0, 0]);
        assert_eq!(batch.page_table[12..], [0; 4]);
        assert_eq!(batch.entries(0), 75);
    }

    #[test]
    fn impossible_rows_are_refused() {
        let mut batch = Batch::default();
        let ok = row(3, &[1]);
        for rows in [
            vec![],
            vec![ok.clone(); 5],
            vec![row(256, &[1])],
            vec![row(1024, &[1, 2, 3, 4])],
            vec![row(3, &[9])],
            vec![row(3, &[0])],
            vec![DecodeRow { window_page: 5, ..ok.clone() }],
            vec![DecodeRow { window_page: 0, ..ok.clone() }],
        ] {
            assert!(batch.fill(&rows, &geometry()).is_err(), "{rows:?}");
        }
        assert!(batch.fill(&[ok], &geometry()).is_ok());
    }
}
