// Package staged owns the effects of rotations: it starts those that a policy or plugged-in files ask for, has successors made, and moves
// the document on as package rotate/stages decides, on the server that drives changes. It takes what admins ask for, on any server.
//
// It refuses to do anything that the audit log does not have first (invariant 10), and decides nothing about gates: what may pass
// is in rotate/stages alone.
package staged
