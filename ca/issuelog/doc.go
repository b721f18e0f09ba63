// Package issuelog owns the issuance log: a Merkle tree over every intent to sign and every certificate, append-only, in
// the C2SP tlog-tiles layout with signed checkpoints, in a folder of the local disk. docs/log.md describes the files.
//
// A Log takes entries (Write) into a journal; once a second what is in the journal goes into the tree, a
// new checkpoint is signed, and the journal is emptied. Opening a log after a crash does the same once, by the same
// code. What Write confirmed is therefore in the tree after the next start, whatever the moment at which the process ended.
//
// It refuses to make a log where none is expected (Create is for explicit commands), to open one whose end does not
// match its checkpoint, and to drop a damaged part of the journal that entries follow: only a cut-off tail is cut. Where the
// machine was restarted since, which explains a hole, the journal is set aside and what lies before the hole counts.
package issuelog
