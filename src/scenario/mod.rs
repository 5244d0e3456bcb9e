//! What a scenario file means: sessions, rounds, dictated calls.
