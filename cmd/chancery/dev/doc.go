// Package dev owns `chancery dev`: a server, an agent and a token issuer in one process, with all state in one folder,
// to see the whole thing work on one machine.
//
// It wires the very parts that `chancery server` and `chancery agent` run; its own are the token issuer and the
// attestation of callers by Unix user. It refuses a folder that another process works in, and is not for production:
// its token issuer vouches for whatever this process asks.
package dev
