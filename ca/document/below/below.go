// Package below owns what an authority document knows of issuers that this server's root signed for servers below: whoever retires that
// root would cut off all that they serve. It refuses to forget one before its certificate has ended.
package below

import (
	"slices"
	"time"
)

// Issuers are those that one server has under one root.
type Issuers struct {
	To    string    `json:"to"`    // SPIFFE ID that asked
	Root  string    `json:"root"`  // ID of the root above them
	Until time.Time `json:"until"` // when the last one has ended, or a while after
}

// Note adds an issuer that ends at a time, and drops those that have ended. It reports whether that changes anything: each server has
// one entry under a root, which is moved by more than is needed, so that who asks again and again does not write each time.
func Note(all []Issuers, x Issuers, now time.Time) (_ []Issuers, changed bool) {
	i := slices.IndexFunc(all, func(o Issuers) bool { return o.To == x.To && o.Root == x.Root })
	if i >= 0 && !all[i].Until.Before(x.Until) {
		return all, false
	}
	x.Until = x.Until.Add(x.Until.Sub(now) / 16).UTC()
	all = slices.DeleteFunc(slices.Clone(all), func(o Issuers) bool { return o.To == x.To && o.Root == x.Root || now.After(o.Until.Add(time.Hour)) })
	return append(all, x), true
}

// Under returns those under a root that have not ended at a time.
func Under(all []Issuers, root string, at time.Time) []Issuers {
	return slices.DeleteFunc(slices.Clone(all), func(o Issuers) bool { return o.Root != root || !at.Before(o.Until) })
}
