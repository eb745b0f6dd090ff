package datastreamer.spark;

import org.apache.spark.sql.vectorized.ColumnVector;

/** Makes the rows of one table from pages; its columns read the page that was taken last. */
interface Rows {
  /** Take the entries of a page from one index up to, not including, another; returns how many
   * rows they are. */
  int take(Page page, int from, int to) throws Doubt;

  /** The page that was taken last. */
  Page page();

  /** The index in it of the entry of a row. */
  int entry(int row);

  /** The column of this name; null if the table of this stream has no values for it. */
  ColumnVector column(String name);
}
