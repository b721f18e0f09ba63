package board

import "slices"

// Lagging returns those of the replicas that do not say that they read a format of the document: what is written in it would shut them out.
// One that nobody has heard of is among them. All are the names of those that live.
func Lagging(all []string, notes []Note, format int) []string {
	var less []string
	for _, name := range all {
		if !slices.ContainsFunc(notes, func(n Note) bool { return n.Replica == name && n.Format >= format }) {
			less = append(less, name)
		}
	}
	return less
}
