// Package rotating owns what a server does about rotation towards its config and towards admins: the group `rotation`, and the admin
// calls that plan, start, show and change a rotation.
//
// It decides nothing about a rotation: rotate/stages does, and rotate/staged carries it out. It refuses to answer before who asks is
// known, and calls that name what there is not: a gate of another phase, a rotation that has ended.
package rotating

// Compromised is the reason of a rotation that taints what it replaces.
const Compromised = "compromised"

// MaxBecause bounds the reason of an override, in bytes.
const MaxBecause = 500
