// Package agents owns the Sync streams: who is connected, what each was sent and has acknowledged, and what it says it serves.
//
// Each stream gets the newest update and skips those between; a slow one holds up nobody. Versions begin at the time of the
// start, so that they grow over restarts, and an acknowledgement counts only for what its own stream was sent.
//
// It refuses more streams than it has room for, in all and of one place, and reports that are too long. What agents report is
// their word: nothing is decided by it. It does not refuse an identity that is revoked: what it sends is public, and whoever
// serves other workloads beside a revoked one needs the CRLs all the more.
package agents
