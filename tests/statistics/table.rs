//! Reads a reference table.

use std::{collections::BTreeMap, path::Path};

/// One row, by column.
pub(crate) struct Row(BTreeMap<String, String>);

impl Row {
    pub(crate) fn text(&self, column: &str) -> &str {
        &self.0[column]
    }

    pub(crate) fn number(&self, column: &str) -> f64 {
        self.text(column).parse().expect("a number")
    }

    pub(crate) fn count(&self, column: &str) -> u64 {
        self.text(column).parse().expect("a number")
    }
}

/// Every row of `tables/<name>.csv`; at least one.
pub(crate) fn rows(name: &str) -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/statistics/tables/{name}.csv"));
    let rows: Vec<Row> =
        csv::Reader::from_path(path).expect("a table").into_deserialize().map(|row| Row(row.expect("a row"))).collect();
    assert!(!rows.is_empty());
    rows
}

/// Asserts that `got` is `wanted` to `relative` of its size.
#[track_caller]
pub(crate) fn assert_close(got: f64, wanted: f64, relative: f64, what: &str) {
    let scale = wanted.abs().max(1e-300);
    assert!((got - wanted).abs() <= relative * scale.max(1e-12), "{what}: got {got:e}, the table has {wanted:e}");
}
