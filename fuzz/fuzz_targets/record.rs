//! Any file: an error or records, each of which can be judged.

#![no_main]

use libfuzzer_sys::fuzz_target;
use toolstorm::validate::{judge, record};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(records) = record::read("fuzz", bytes) {
        for record in records {
            judge(&record.observation(), &record.expectation);
        }
    }
});
