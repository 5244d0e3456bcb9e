//! The statistics against the values of SciPy and statsmodels (`tables/make.py` writes them).

mod exact;
mod intervals;
mod table;
