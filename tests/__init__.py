"""Tests: `unit` mirrors the source tree; `golden` compares bits;
`fault` kills and lies; `integration` runs commands."""
