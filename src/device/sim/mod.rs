//! The virtual GPU: a discrete-event simulator with a seeded order, honest memory and real arithmetic.
