//! A report for people ([`terminal`], [`html`]) and for machines ([`json`], [`sarif`]).

pub mod html;
pub mod json;
pub mod lanes;
pub mod sarif;
pub mod terminal;
