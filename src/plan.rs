//! What a run will take: cells, sessions, requests, expected time, power.
