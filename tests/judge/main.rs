//! The judge against recorded failures, in every chunking, and against its own limits.

#[cfg(test)]
mod cases;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod parity;
#[cfg(test)]
mod selfcheck;
#[cfg(test)]
mod siblings;
